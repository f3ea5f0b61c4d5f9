#pragma once

#include <cstdint>

#include "kvpool/base/aligned_buffer.h"
#include "kvpool/base/ids.h"
#include "kvpool/formats/format.h"

namespace kvpool::storage {

/// The bytes of one block.
///
///   none --first use--> held by `checkout` --blocks_freed--> free (bytes stay) --next use--> held
///     ^----------------- release, blocks_retired ------------------/
///
/// A slot whose checkout is not the block's present one is out of date, whether or not the pool's
/// notice has come yet: its rows belong to nobody and are zeroed before they are seen.
struct BlockSlot {
  std::uint64_t checkout = 0;
  BlockId id{};
  formats::Format format = formats::Format::kFp16;
  /// The checkout has ended.
  bool free = false;
  /// Every byte of `buffer` is zero.
  bool zero = false;
  /// One past the last row written in this checkout.
  std::int64_t n_written = 0;
  AlignedBuffer buffer;
};

}  // namespace kvpool::storage
