#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/core/shortage.h"
#include "kvpool/storage/page_store.h"

namespace kvpool::cache {

/// The blocks behind a cache were freed without it (free_all of its owner): what it holds is no
/// longer charged to anyone. release() makes it usable again.
class LeaseLost : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// A step does not fit into the pool. No layer has moved.
class StepExhausted : public BlockPoolExhausted {
 public:
  StepExhausted(const std::string& message, core::Shortage why, std::int64_t fitting)
      : BlockPoolExhausted(message), shortage(why), tokens_that_fit(fitting) {}
  /// The blocks would have been there; `owner` is whose step it was.
  StepExhausted(const std::string& message, storage::ByteShortage why, OwnerId owner,
                std::int64_t fitting)
      : BlockPoolExhausted(message), bytes(why), tokens_that_fit(fitting) {
    shortage.owner = owner;
  }

  /// Names only the owner where bytes ended first.
  core::Shortage shortage;
  std::optional<storage::ByteShortage> bytes;
  /// Tokens that every layer of the group could still take.
  std::int64_t tokens_that_fit;
};

}  // namespace kvpool::cache
