#pragma once

#include <cstdint>
#include <span>

#include "kvpool/base/ids.h"

namespace kvpool::core {

/// Told what became of blocks, so that storage can follow. Called by the thread that made the
/// change, after the pool's lock is released: by then another thread may have checked the block
/// out again, so compare `checkout` with what you stored before touching anything.
class PoolObserver {
 public:
  struct Event {
    BlockId id{};
    std::uint32_t record = 0;
    /// BlockInfo::checkout of the checkout that ended; 0 for a block that was never handed out.
    std::uint64_t checkout = 0;
  };

  virtual ~PoolObserver() = default;

  /// Blocks whose last reference was dropped: they are on a free list (or handed out again).
  virtual void blocks_freed(std::span<const Event> events) noexcept = 0;
  /// Blocks removed by shrink: their ids never come back.
  virtual void blocks_retired(std::span<const Event> events) noexcept = 0;
};

/// Told when an owner lost blocks that are pinned, so that whoever keeps pins for readers to come
/// can take them back. Called like a PoolObserver.
class PinObserver {
 public:
  virtual ~PinObserver() = default;

  virtual void blocks_detained(OwnerId owner) noexcept = 0;
};

}  // namespace kvpool::core
