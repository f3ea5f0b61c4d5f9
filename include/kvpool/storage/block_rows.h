#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/formats/format.h"

namespace kvpool::storage {

/// A copy of rows of a block, as they lie there.
struct BlockRows {
  formats::Format format = formats::Format::kFp16;
  std::int64_t n_rows = 0;
  /// [n_rows, row_bytes(format, row_width)]
  std::vector<std::byte> bytes;
};

}  // namespace kvpool::storage
