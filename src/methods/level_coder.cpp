#include "kvpool/methods/level_coder.h"

#include <cmath>

#include "kvpool/methods/row_math.h"

namespace kvpool::methods {

Magnitude LevelCoder::encode(const float* block, std::int64_t n,
                             std::uint8_t* codes) const noexcept {
  const double squared = squared_norm(block, n);
  const double size = std::sqrt(squared / static_cast<double>(n));
  const auto unit = static_cast<float>(size > 0 ? 1 / size : 0);
  for (std::int64_t i = 0; i < n; ++i) codes[i] = codebook_.code(block[i] * unit);
  if (scale_ == TokenScale::kNorm || size == 0) return to_magnitude(static_cast<float>(size));

  const auto level = [&](std::int64_t i) { return static_cast<double>(codebook_.level(codes[i])); };
  const double overlap =
      ordered_sum(n, [&](std::int64_t i) { return static_cast<double>(block[i]) * level(i); });
  if (scale_ == TokenScale::kUnbiased) return to_magnitude(static_cast<float>(squared / overlap));
  const double levels = ordered_sum(n, [&](std::int64_t i) { return level(i) * level(i); });
  return to_magnitude(static_cast<float>(overlap / levels));
}

}  // namespace kvpool::methods
