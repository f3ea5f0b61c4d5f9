#pragma once

#include <nanobind/nanobind.h>

// One function a file of this folder; module.cpp calls each.
namespace kvpool::bindings {

void bind_block_pool(nanobind::module_& m);
void bind_leases(nanobind::module_& m);
void bind_block_storage(nanobind::module_& m);
void bind_exact_cache(nanobind::module_& m);
void bind_formats(nanobind::module_& m);
void bind_methods(nanobind::module_& m);
void bind_stream_lease(nanobind::module_& m);

}  // namespace kvpool::bindings
