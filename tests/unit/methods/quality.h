#pragma once

#include <cstdint>

#include "kvpool/methods/quantized_kv_cache.h"
#include "vectors.h"

namespace kvpool::methods {

inline constexpr std::int64_t kDims = 128;
inline constexpr std::int64_t kTokens = 512;
inline constexpr std::int64_t kQueries = 16;
inline constexpr unsigned kSeeds = 3;

struct Quality {
  double cosine = 0;
  double peaked_cosine = 0;
  double bytes = 0;
};

/// Mean cosine of the outputs for normal queries, and for queries that one key answers.
inline Quality measure(KVCacheConfig config) {
  Quality quality;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    config.seed = seed;
    const Vectors keys = normal_vectors(kTokens, kDims, 10 * seed + 1);
    const Vectors values = normal_vectors(kTokens, kDims, 10 * seed + 2);
    QuantizedKVCache cache(config);
    cache.append(keys.data(), values.data(), {}, kTokens);
    quality.bytes = static_cast<double>(cache.memory_bytes()) / kTokens;
    const auto mean_cosine = [&](const Vectors& queries) {
      Vectors found(queries.size());
      cache.attend({.data = queries.data(), .n_queries = kQueries}, found.data());
      double sum = 0;
      for (std::int64_t i = 0; i < kQueries; ++i) {
        const auto exact = exact_attention(queries.data() + i * kDims, keys.data(), values.data(),
                                           0, kTokens, kDims);
        sum += cosine(found.data() + i * kDims, exact.data(), kDims);
      }
      return sum / kQueries / kSeeds;
    };
    quality.cosine += mean_cosine(normal_vectors(kQueries, kDims, 10 * seed + 3));
    quality.peaked_cosine += mean_cosine(peaked_queries(keys, kQueries, kDims, 10 * seed + 4));
  }
  return quality;
}

}  // namespace kvpool::methods
