#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvpool::bindings {

/// The Python error indicator is set: unwind to the call's entry (see guarded in errors.h).
struct PythonErrorSet {};

/// Sets `type` with a message `[call] ...` from a PyUnicode_FromFormat pattern, and throws.
[[noreturn]] void refuse(PyObject* type, const char* call, const char* pattern, ...);

/// `value` as a 64-bit int through __index__; bool and float are refused (TypeError), as is what
/// does not fit (ValueError). May run Python code: convert before touching the pool.
std::int64_t int_argument(const char* call, const char* name, PyObject* value);

/// Parameters of a METH_FASTCALL | METH_KEYWORDS function. This is what a hot call pays instead of
/// a general dispatcher: where all arguments are positional it copies pointers.
class ParameterList {
 public:
  static constexpr std::size_t kMax = 6;

  /// The first `n_positional` may be given by position, the first `n_required` must be given.
  consteval ParameterList(const char* call, std::size_t n_required, std::size_t n_positional,
                          std::array<const char*, kMax> names)
      : call_(call), n_required_(n_required), n_positional_(n_positional), names_(names) {
    while (n_ < kMax && names_[n_] != nullptr) ++n_;
  }

  /// Writes borrowed references to `out` in the order of the names; null where not given.
  /// Throws PythonErrorSet.
  void bind(PyObject* const* args, Py_ssize_t n_args, PyObject* kwnames, std::span<PyObject*> out) {
    const auto given = static_cast<std::size_t>(n_args);
    if (kwnames != nullptr || given < n_required_ || given > n_positional_) {
      bind_slowly(args, given, kwnames, out);
      return;
    }
    for (std::size_t i = 0; i < given; ++i) out[i] = args[i];
  }

  const char* call() const noexcept { return call_; }

 private:
  void bind_slowly(PyObject* const* args, std::size_t n_args, PyObject* kwnames,
                   std::span<PyObject*> out);
  std::size_t index_of(PyObject* keyword);

  const char* call_;
  std::size_t n_ = 0;
  std::size_t n_required_;
  std::size_t n_positional_;
  std::array<const char*, kMax> names_;
  std::array<PyObject*, kMax> interned_{};  // made on first use, under the GIL
};

}  // namespace kvpool::bindings
