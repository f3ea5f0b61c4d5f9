#pragma once

#include <nanobind/nanobind.h>

// One function a file of this folder; module.cpp calls each.
namespace kvpool::bindings {

}  // namespace kvpool::bindings
