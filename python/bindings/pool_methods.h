#pragma once

#include <Python.h>

// The calls of BlockPoolAllocator as bare METH_FASTCALL | METH_KEYWORDS functions: a general
// dispatcher costs as much as the shortest of them does.
namespace kvpool::bindings {

using Arguments = PyObject* const*;

PyObject* allocate(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* allocate_kv(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* free_blocks(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* free_all(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* mark_used(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);

PyObject* register_owner(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* release_owner(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* is_active(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* new_owner(PyObject* self, PyObject* unused);

PyObject* fork(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* writable(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);

PyObject* reserve(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* reserve_blocks(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* n_reserved(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* n_allocatable(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);

PyObject* n_free(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* n_available(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* blocks_for(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* shrink(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames);
PyObject* check_invariants(PyObject* self, PyObject* unused);

}  // namespace kvpool::bindings
