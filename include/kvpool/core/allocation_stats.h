#pragma once

#include <cstdint>

namespace kvpool::core {

/// Counters and gauges of a BlockPoolAllocator. Counts are cumulative since construction unless
/// noted, and count blocks (not calls) that really leave or re-enter a free list.
struct AllocationStats {
  /// Blocks managed now, over all streams.
  std::int64_t n_blocks = 0;
  std::int64_t n_allocations = 0;
  std::int64_t n_frees = 0;
  /// Allocated blocks that had been handed out before.
  std::int64_t n_reused = 0;
  /// Calls that failed because too few blocks were free.
  std::int64_t n_exhausted = 0;
  std::int64_t n_grown = 0;
  std::int64_t n_retired = 0;
  std::int64_t peak_blocks_in_use = 0;
  /// Blocks in use now with 0 < n_used < block_size.
  std::int64_t fragmented_count = 0;
  /// Token slots of blocks in use now that hold no token.
  std::int64_t unused_slot_count = 0;

  friend bool operator==(const AllocationStats&, const AllocationStats&) = default;

  std::int64_t blocks_in_use() const noexcept { return n_allocations - n_frees; }
  /// Partly filled blocks as a share of the managed ones, in [0, 1]; 0 for a pool without blocks.
  double fragmentation() const noexcept {
    return n_blocks == 0 ? 0.0
                         : static_cast<double>(fragmented_count) / static_cast<double>(n_blocks);
  }
  std::int64_t unused_slots() const noexcept { return unused_slot_count; }
};

}  // namespace kvpool::core
