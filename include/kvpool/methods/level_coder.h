#pragma once

#include <cstdint>
#include <utility>

#include "kvpool/methods/codebook.h"
#include "kvpool/methods/kv_cache_config.h"
#include "kvpool/methods/magnitude.h"

namespace kvpool::methods {

/// What multiplies the levels of a block of codes.
enum class TokenScale : std::uint8_t {
  /// The block's root mean square, as published: scores shrink by the quantiser's error.
  kNorm,
  /// Makes <decoded, block> = |block|^2: scores do not shrink. For keys.
  kUnbiased,
  /// Makes |decoded - block| least. For values.
  kLeastSquares,
};

/// That of keys.
inline TokenScale key_scale(const KVCacheConfig& config) noexcept {
  return config.scores_are_unbiased() ? TokenScale::kUnbiased : TokenScale::kNorm;
}

/// Rounds a block of rotated coordinates to the levels of a codebook, relative to the block's size.
class LevelCoder {
 public:
  LevelCoder(Codebook codebook, TokenScale scale) : codebook_(std::move(codebook)), scale_(scale) {}

  const Codebook& codebook() const noexcept { return codebook_; }
  int bits() const noexcept { return codebook_.bits(); }

  /// Fills `codes` and returns the scale: coordinate i ~ scale * level(codes[i]).
  Magnitude encode(const float* block, std::int64_t n, std::uint8_t* codes) const noexcept;

 private:
  Codebook codebook_;
  TokenScale scale_;
};

}  // namespace kvpool::methods
