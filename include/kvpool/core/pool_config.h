#pragma once

#include <cstdint>
#include <optional>

namespace kvpool::core {

/// Sizing and behaviour of a BlockPoolAllocator.
struct PoolConfig {
  /// Token slots of all blocks are counted in 64 bits.
  static constexpr std::int64_t kMaxBlockSize = 0x7fff'ffff;
  static constexpr std::int64_t kMaxBlocks = 0x7fff'ffff;

  /// Token slots in a block, 1..kMaxBlockSize.
  std::int64_t block_size = 16;
  /// Blocks managed at the start over all streams, 1..kMaxBlocks. With separate_kv, keys get the
  /// odd one.
  std::int64_t n_blocks = 1024;
  /// Keys and values draw on free lists of their own; otherwise one list backs both.
  bool separate_kv = true;
  /// An allocation that would run out mints exactly the missing blocks instead.
  bool grow_on_exhaustion = false;
  /// Upper bound on managed blocks over all streams; >= n_blocks where the pool may grow, and not
  /// looked at otherwise.
  std::optional<std::int64_t> max_blocks;

  friend bool operator==(const PoolConfig&, const PoolConfig&) = default;

  /// Throws InvalidArgument naming the first field out of range and its value.
  void validate() const;
};

}  // namespace kvpool::core
