#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kvpool/formats/format.h"

// One function a file of this folder; module.cpp calls each.
namespace kvpool::bindings {

void bind_paged_pool(nanobind::module_& m);
void bind_paged_layer(nanobind::module_& m);
void bind_method_formats(nanobind::module_& m);
void bind_attention(nanobind::module_& m);

/// Throws InvalidArgument for a name that is no format's.
formats::Format page_format(const std::string& name);

}  // namespace kvpool::bindings
