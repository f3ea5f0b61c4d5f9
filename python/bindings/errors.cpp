#include "errors.h"

#include <nanobind/nanobind.h>

#include <exception>
#include <new>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace nb = nanobind;

namespace kvpool::bindings {
namespace {

// Looked up when raised: the module is Python's, and importing it here would make a circle.
nb::object exception_class(const char* name) {
  return nb::module_::import_("kvpool.core.exceptions").attr(name);
}

/// The blocks were there, their memory was not.
void set_out_of_bytes_error(const cache::StepExhausted& e) {
  nb::object error = exception_class("BlockPoolExhaustedError")(e.what());
  error.attr("owner") = nb::int_(e.shortage.owner);
  error.attr("needed_bytes") = nb::int_(e.bytes->needed);
  error.attr("available_bytes") = nb::int_(e.bytes->available);
  error.attr("tokens_that_fit") = nb::int_(e.tokens_that_fit);
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

bool set_library_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const OwnerAlreadyActive& e) {
    PyErr_SetString(exception_class("OwnerAlreadyActiveError").ptr(), e.what());
  } catch (const cache::StepExhausted& e) {
    if (e.bytes) {
      set_out_of_bytes_error(e);
    } else {
      set_exhausted_error(e.shortage, e.what(), e.tokens_that_fit);
    }
  } catch (const BlockPoolExhausted& e) {
    PyErr_SetString(exception_class("BlockPoolExhaustedError").ptr(), e.what());
  } catch (const InvalidArgument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (...) {
    return false;
  }
  return true;
}

}  // namespace

void set_python_error() noexcept {
  try {
    throw;
  } catch (const PythonErrorSet&) {
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    try {
      if (!set_library_error(std::current_exception())) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
      }
    } catch (nb::python_error& lookup) {
      lookup.restore();
    }
  } catch (...) {
    PyErr_SetString(PyExc_SystemError, "[kvpool] unknown C++ exception");
  }
}

void register_exceptions() {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    if (!set_library_error(error)) std::rethrow_exception(error);
  });
}

void set_exhausted_error(const core::Shortage& shortage, const char* message,
                         std::optional<std::int64_t> tokens_that_fit) {
  const std::string_view stream = core::name(shortage.stream);
  nb::object error = exception_class("BlockPoolExhaustedError")(message);
  error.attr("stream") = nb::str(stream.data(), stream.size());
  error.attr("owner") = nb::int_(shortage.owner);
  error.attr("needed") = nb::int_(shortage.needed);
  error.attr("available") = nb::int_(shortage.available);
  error.attr("managed") = nb::int_(shortage.managed);
  if (tokens_that_fit) error.attr("tokens_that_fit") = nb::int_(*tokens_that_fit);
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

PyObject* raise_exhausted(const core::Shortage& shortage, const char* call) noexcept {
  return guarded([&]() -> PyObject* {
    set_exhausted_error(shortage, shortage.message(call).c_str());
    return nullptr;
  });
}

}  // namespace kvpool::bindings
