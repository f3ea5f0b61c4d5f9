#pragma once

#include <cstdint>

#include "kvpool/base/ids.h"
#include "kvpool/core/stream.h"

namespace kvpool::core {

/// Names a format tag interned by one pool (BlockPoolAllocator::intern_format). The pool does not
/// know what a format means.
enum class FormatTag : std::uint16_t {};

/// One owner's reference to one block, valid from the checkout (or fork) that returned it until
/// that reference is freed. Plain data: copies name the same reference.
///
/// A handle is *live* while its reference exists, *stale* once the reference was freed (also when
/// the block has since been handed out again: serials are never used twice), and *foreign* when
/// `pool` is another pool's id or it names nothing this pool ever handed out.
struct BlockHandle {
  /// Process-wide id of the pool that made the handle; 0 in a default-constructed one.
  std::uint64_t pool = 0;
  /// Unique in the pool among all references ever made.
  std::uint64_t serial = 0;
  /// The block's record in the pool. Records of retired blocks are used again, ids are not.
  std::uint32_t record = 0;
  /// 0 for the reference of the checkout itself, otherwise 1 + the pool's slot for the extra
  /// reference that fork made.
  std::uint32_t reference = 0;
  BlockId id{};
  Stream stream = Stream::kKey;

  friend bool operator==(const BlockHandle&, const BlockHandle&) = default;
};

}  // namespace kvpool::core
