#include "arguments.h"

#include <cstdarg>

namespace kvpool::bindings {

void refuse(PyObject* type, const char* call, const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  PyObject* what = PyUnicode_FromFormatV(pattern, values);
  va_end(values);
  if (what != nullptr) {
    PyErr_Format(type, "[%s] %U", call, what);
    Py_DECREF(what);
  }
  throw PythonErrorSet{};
}

std::int64_t int_argument(const char* call, const char* name, PyObject* value) {
  PyObject* number = nullptr;
  if (PyLong_CheckExact(value)) {
    number = Py_NewRef(value);
  } else if (PyBool_Check(value) || !PyIndex_Check(value)) {
    refuse(PyExc_TypeError, call, "%s must be an int, got %R", name, value);
  } else {
    number = PyNumber_Index(value);
    if (number == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {  // an array of floats, say
      PyErr_Clear();
      refuse(PyExc_TypeError, call, "%s must be an int, got %R", name, value);
    }
    if (number == nullptr) throw PythonErrorSet{};
  }
  int overflow = 0;
  const std::int64_t result = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  if (overflow != 0) refuse(PyExc_ValueError, call, "%s must fit in 64 bits, got %R", name, value);
  return result;
}

void ParameterList::bind_slowly(PyObject* const* args, std::size_t n_args, PyObject* kwnames,
                                std::span<PyObject*> out) {
  if (n_args > n_positional_) {
    refuse(PyExc_TypeError, call_, "takes %zu positional arguments at most, got %zu", n_positional_,
           n_args);
  }
  for (std::size_t i = 0; i < n_args; ++i) out[i] = args[i];
  const Py_ssize_t n_keywords = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  for (Py_ssize_t k = 0; k < n_keywords; ++k) {
    PyObject* keyword = PyTuple_GET_ITEM(kwnames, k);
    const std::size_t i = index_of(keyword);
    if (i == n_) refuse(PyExc_TypeError, call_, "has no argument %R", keyword);
    if (out[i] != nullptr) refuse(PyExc_TypeError, call_, "argument %s is given twice", names_[i]);
    out[i] = args[n_args + static_cast<std::size_t>(k)];
  }
  for (std::size_t i = 0; i < n_required_; ++i) {
    if (out[i] == nullptr) refuse(PyExc_TypeError, call_, "argument %s is missing", names_[i]);
  }
}

std::size_t ParameterList::index_of(PyObject* keyword) {
  for (std::size_t i = 0; i < n_; ++i) {
    if (interned_[i] == nullptr) interned_[i] = PyUnicode_InternFromString(names_[i]);
    if (interned_[i] == keyword) return i;
  }
  for (std::size_t i = 0; i < n_; ++i) {
    if (PyUnicode_CompareWithASCIIString(keyword, names_[i]) == 0) return i;
  }
  return n_;
}

}  // namespace kvpool::bindings
