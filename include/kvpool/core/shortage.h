#pragma once

#include <cstdint>
#include <string>

#include "kvpool/base/ids.h"
#include "kvpool/core/stream.h"

namespace kvpool::core {

/// Why a request could not be met: the expected failure of the hot path, as a value.
struct Shortage {
  Stream stream = Stream::kKey;
  OwnerId owner = 0;
  /// Blocks the request needs of the stream.
  std::int64_t needed = 0;
  /// Blocks the owner could have had, those the pool may still grow by included.
  std::int64_t available = 0;
  /// Blocks of the stream managed now.
  std::int64_t managed = 0;

  /// `[call] stream k needs 5 blocks, 4 free of 16`.
  std::string message(const char* call) const;
};

}  // namespace kvpool::core
