#pragma once

#include <cstdint>
#include <memory>

#include "kvpool/base/adaptive_lock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/core/block_pool_allocator.h"
#include "kvpool/kernels/worker_pool.h"
#include "kvpool/storage/page_store.h"

namespace kvpool::cache {

class GroupRegistry;

/// What paged caches share: the blocks that they are charged, the memory of the pages, the threads
/// that attend. One for each allocator, so that the byte budget is one too. Thread-safe.
class PagedPool {
 public:
  /// `workers` null: attention runs in the calling thread alone. Throws InvalidArgument where
  /// `blocks` is null or `store` out of range.
  explicit PagedPool(std::shared_ptr<core::BlockPoolAllocator> blocks,
                     storage::PageStoreOptions store = {},
                     std::shared_ptr<kernels::WorkerPool> workers = nullptr);
  ~PagedPool();
  PagedPool(const PagedPool&) = delete;
  PagedPool& operator=(const PagedPool&) = delete;

  core::BlockPoolAllocator& blocks() const noexcept { return *blocks_; }
  const std::shared_ptr<core::BlockPoolAllocator>& allocator() const noexcept { return blocks_; }
  storage::PageStore& store() noexcept { return store_; }
  const storage::PageStore& store() const noexcept { return store_; }
  kernels::WorkerPool* workers() const noexcept { return workers_.get(); }
  std::int64_t block_size() const noexcept { return blocks_->config().block_size; }

 private:
  friend class PagedGroup;
  friend class PageTable;

  std::shared_ptr<core::BlockPoolAllocator> blocks_;
  storage::PageStore store_;
  std::shared_ptr<kernels::WorkerPool> workers_;
  std::shared_ptr<GroupRegistry> groups_;
  /// Guards who reads which table; inside a group's lock, outside the allocator's.
  AdaptiveLock readers_lock_;
  ForkGuard readers_guard_{readers_lock_, 1};
};

}  // namespace kvpool::cache
