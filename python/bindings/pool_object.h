#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::cache {
class PagedPool;
}

namespace kvpool::bindings {

/// Strings of format names by tag and back, so that the hot calls neither build nor hash one.
/// Guarded by the GIL.
class FormatStrings {
 public:
  FormatStrings() = default;
  FormatStrings(const FormatStrings&) = delete;
  FormatStrings& operator=(const FormatStrings&) = delete;
  ~FormatStrings();

  /// The tag of `name`, which must be a str. Throws PythonErrorSet or what intern_format throws.
  core::FormatTag tag(core::BlockPoolAllocator& pool, const char* call, PyObject* name);
  /// A borrowed reference; null with the Python error set.
  PyObject* name(const core::BlockPoolAllocator& pool, core::FormatTag tag);
  /// No format but the default has been used through this object.
  bool only_default() const noexcept { return strings_.size() <= 1; }

 private:
  void remember(core::FormatTag tag, PyObject* name);

  std::vector<PyObject*> strings_;  // by tag; null where not asked for yet
};

/// Memory for handles that is kept between calls: fresh memory of that size would cost a page fault
/// for each hundred of them. Guarded by the GIL.
class HandleMemory {
 public:
  HandleMemory() = default;
  HandleMemory(const HandleMemory&) = delete;
  HandleMemory& operator=(const HandleMemory&) = delete;
  ~HandleMemory() { std::free(data_); }

 private:
  friend class HandleBuffer;
  core::BlockHandle* data_ = nullptr;
  std::size_t capacity_ = 0;
};

/// Uninitialised room for the handles of one call; none where that asks for more than `most`.
/// Takes `memory` away for its lifetime, so that a call made from Python code that runs meanwhile
/// gets memory of its own.
class HandleBuffer {
 public:
  /// `n` above `most` is a request that the pool refuses before it writes a handle.
  /// Throws std::bad_alloc.
  HandleBuffer(HandleMemory& memory, std::size_t n,
               std::size_t most = std::numeric_limits<std::size_t>::max());
  ~HandleBuffer();
  HandleBuffer(const HandleBuffer&) = delete;
  HandleBuffer& operator=(const HandleBuffer&) = delete;

  std::span<core::BlockHandle> handles() const noexcept { return {data_, n_}; }
  /// The first or the second half.
  std::span<core::BlockHandle> half(int which) const noexcept {
    const std::size_t n = n_ / 2;
    return {data_ == nullptr || which == 0 ? data_ : data_ + n, n};
  }

 private:
  static constexpr std::size_t kSmall = 4;

  HandleMemory& memory_;
  std::size_t n_;
  core::BlockHandle* data_;
  std::size_t capacity_ = 0;  // 0: in small_
  alignas(core::BlockHandle) std::byte small_[kSmall * sizeof(core::BlockHandle)];
};

/// What a Python BlockPoolAllocator wraps. Bindings that need the pool in C++ take a PoolObject&.
struct PoolObject {
  explicit PoolObject(const core::PoolConfig& config);

  std::shared_ptr<core::BlockPoolAllocator> pool;
  std::uint64_t id;
  std::size_t most_blocks;  // that can ever be checked out at a time
  bool separate_kv;
  FormatStrings formats;
  HandleMemory handle_memory;
  /// Pages and threads of paged caches, shared by all of them: made by kvpool._mlx when the first
  /// one asks. Guarded by the GIL.
  std::shared_ptr<cache::PagedPool> paged;
};

/// The PoolObject behind `self`, an instance of the bound type. Throws nanobind::python_error where
/// a subclass has not called __init__.
inline PoolObject& pool_object(PyObject* self) {
  if (!nanobind::inst_ready(self)) [[unlikely]] {
    PyErr_SetString(PyExc_RuntimeError, "[BlockPoolAllocator] __init__ was not called");
    throw nanobind::python_error();
  }
  return *nanobind::inst_ptr<PoolObject>(self);
}

/// The PoolObject behind an argument that may be anything: what claims to be a pool for isinstance
/// (a mock, a proxy) need not be one. Throws nanobind::python_error.
PoolObject& pool_argument(const char* call, PyObject* pool);

}  // namespace kvpool::bindings
