#pragma once

#include <memory>

#include "kvpool/methods/kv_cache_config.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// A method made from its parameters: immutable, so that all layers of a model can share one.
struct Method {
  KVCacheConfig config;
  std::unique_ptr<const StreamCodec> keys;
  std::unique_ptr<const StreamCodec> values;
};

/// Bytes that a token's key and value take once quantised.
inline double coded_bytes_per_token(const Method& method) {
  constexpr std::int64_t kTokens = 1 << 12;
  const std::int64_t group = method.keys->group() * method.values->group();
  const std::int64_t tokens = kTokens * group;
  return static_cast<double>(method.keys->page_bytes(tokens) + method.values->page_bytes(tokens)) /
         static_cast<double>(tokens);
}

}  // namespace kvpool::methods
