#pragma once

#include <Python.h>

#include <cstdint>
#include <optional>

#include "arguments.h"
#include "kvpool/core/shortage.h"

namespace kvpool::bindings {

/// To be called in a catch block: sets the Python exception that fits the C++ one in flight.
/// InvalidArgument is a ValueError, OwnerAlreadyActive and BlockPoolExhausted are the exceptions of
/// kvpool.core.exceptions.
void set_python_error() noexcept;

/// Makes functions bound by nanobind raise the same exceptions.
void register_exceptions();

/// Sets BlockPoolExhaustedError with the shortage's message and numbers; returns null.
PyObject* raise_exhausted(const core::Shortage& shortage, const char* call) noexcept;

/// Sets BlockPoolExhaustedError with this message, the shortage's numbers and, where known, the
/// tokens that would have fit.
void set_exhausted_error(const core::Shortage& shortage, const char* message,
                         std::optional<std::int64_t> tokens_that_fit = std::nullopt);

/// Runs the body of a function that CPython calls: any C++ exception becomes a Python one, and the
/// result `failure`.
template <typename Body, typename Result = PyObject*>
Result guarded(Body&& body, Result failure = nullptr) noexcept {
  try {
    return body();
  } catch (...) {
    set_python_error();
    return failure;
  }
}

}  // namespace kvpool::bindings
