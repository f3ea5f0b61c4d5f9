#pragma once

#include <cstdint>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/core/shortage.h"

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

  core::Shortage shortage;
  /// Tokens that every layer of the group could still take.
  std::int64_t tokens_that_fit;
};

}  // namespace kvpool::cache
