#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "block_slot.h"
#include "kvpool/base/adaptive_lock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/core/pool_observer.h"
#include "kvpool/storage/block_storage.h"
#include "kvpool/storage/idle_buffers.h"

namespace kvpool::storage {

/// `[BlockStorage::call] `
std::string head(const char* call);
/// `block 3`
std::string named(const core::BlockHandle& block);

/// Shared with the pool, which tells it of freed and retired blocks.
///
/// Locks: `lock` guards everything below it. The pool's own lock is taken inside it, never around
/// it: the pool calls its observers after letting go.
class BlockStorage::State : public core::PoolObserver {
 public:
  State(std::uint64_t pool, std::int64_t block_size, std::int64_t width,
        const StorageOptions& settings)
      : pool_id(pool),
        block_rows(block_size),
        row_width(width),
        options(settings),
        idle(settings.idle_limit_bytes) {}

  void blocks_freed(std::span<const Event> events) noexcept override;
  void blocks_retired(std::span<const Event> events) noexcept override;

  // Everything below is called with the lock held.

  /// The handle's block as the pool sees it now. Throws for a stale or foreign handle.
  core::BlockInfo live(const char* call, const core::BlockPoolAllocator& pool,
                       const core::BlockHandle& block) const;
  formats::Format format_of(const char* call, const core::BlockPoolAllocator& pool,
                            core::FormatTag tag);
  /// The block's slot, brought up to date with its checkout and format: it has a buffer of the
  /// right size whose rows are this checkout's. Throws before it changes anything.
  BlockSlot& touch(const char* call, const core::BlockHandle& block, const core::BlockInfo& info,
                   formats::Format format);
  /// Takes the buffer out of a slot, ready for anybody.
  AlignedBuffer detach(BlockSlot& slot) noexcept;

  std::size_t row_bytes(formats::Format format) const noexcept {
    return formats::row_bytes(format, static_cast<std::size_t>(row_width));
  }
  std::size_t block_bytes(formats::Format format) const noexcept {
    return static_cast<std::size_t>(block_rows) * row_bytes(format);
  }

  const std::uint64_t pool_id;
  const std::int64_t block_rows;
  const std::int64_t row_width;
  const StorageOptions options;

  mutable AdaptiveLock lock;
  ForkGuard fork_guard{lock, 1};
  /// By record of the pool; each has a buffer. (A map because a node can be made before the pool is
  /// asked for the block that it is for.)
  std::unordered_map<std::uint32_t, BlockSlot> slots;
  /// By tag of the pool; empty where the tag has not been looked up yet.
  std::vector<std::optional<formats::Format>> format_by_tag;
  std::size_t resident_bytes = 0;
  IdleBuffers idle;
};

}  // namespace kvpool::storage
