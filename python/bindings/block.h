#pragma once

#include <Python.h>

#include <cstdint>
#include <span>

#include "kvpool/core/block_handle.h"

namespace kvpool::bindings {

struct DetachedBlock;

/// kvpool.memory.Block: one owner's reference to a block of a pool, or a *detached* one, made by
/// hand or unpickled, which is plain values and belongs to no pool.
///
/// A plain CPython object of 48 bytes, since lists of thousands are made and dropped: no
/// dictionary, no part in garbage collection. It refers to its pool, which never refers to it by
/// itself; a pool that a user makes keep its own blocks (as an attribute, say) is not collected.
struct BlockObject {
  PyObject_HEAD PyObject* pool;  // strong, a PoolObject; null in a detached one
  union {
    std::uint64_t serial;
    DetachedBlock* detached;  // owned
  };
  std::uint32_t record;
  std::uint32_t reference;
  BlockId id;
  core::FormatTag format;  // as last seen: what a stale handle answers
  core::Stream stream;
};
static_assert(sizeof(BlockObject) == 48);

/// Made by add_block_type.
PyTypeObject* block_type() noexcept;
void add_block_type(PyObject* module);

inline bool is_block(PyObject* object) noexcept { return Py_TYPE(object) == block_type(); }
inline BlockObject* as_block(PyObject* object) noexcept {
  return reinterpret_cast<BlockObject*>(object);
}

/// The handle behind an attached block.
core::BlockHandle handle_of(const BlockObject& block) noexcept;

/// The handle behind any Python object that is to be an attached block. Throws PythonErrorSet:
/// TypeError for another type, ValueError for a detached block, both naming `name`.
core::BlockHandle block_argument(const char* call, const char* name, PyObject* object);

/// A new Block, or null with the Python error set. `pool` is a PoolObject.
PyObject* new_block(PyObject* pool, const core::BlockHandle& handle,
                    core::FormatTag format) noexcept;
/// A list of new Blocks of one format.
PyObject* new_block_list(PyObject* pool, std::span<const core::BlockHandle> handles,
                         core::FormatTag format) noexcept;

}  // namespace kvpool::bindings
