#pragma once

#include <cstdint>

#include "kvpool/base/ids.h"
#include "kvpool/core/block_handle.h"

namespace kvpool::core {

/// What the pool knows of the block behind a handle at one moment.
struct BlockInfo {
  BlockId id{};
  Stream stream = Stream::kKey;
  FormatTag format{};
  /// Token slots in use, 0..block_size.
  std::int64_t n_used = 0;
  OwnerId owner = 0;
  /// References to the block over all owners, >= 1.
  std::int64_t n_references = 0;
  /// Serial of the checkout that took the block off the free list: equal for all references of
  /// one checkout, never used twice. Storage stamps its bytes with it.
  std::uint64_t checkout = 0;
};

}  // namespace kvpool::core
