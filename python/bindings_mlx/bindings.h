#pragma once

#include <nanobind/nanobind.h>

// One function a file of this folder; module.cpp calls each.
namespace kvpool::bindings {

void bind_paged_pool(nanobind::module_& m);
void bind_paged_layer(nanobind::module_& m);
void bind_attention(nanobind::module_& m);

}  // namespace kvpool::bindings
