#include "kvpool/methods/sign_sketch.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kvpool/methods/row_math.h"

namespace kvpool::methods {

Magnitude SignSketch::encode(const float* x, std::byte* signs, float* scratch) const noexcept {
  projection_->apply(x, scratch);
  for (std::int64_t byte = 0; byte < row_bytes(); ++byte) {
    unsigned bits = 0;
    const std::int64_t n = std::min<std::int64_t>(8, n_signs() - 8 * byte);
    for (std::int64_t i = 0; i < n; ++i) bits |= (scratch[8 * byte + i] > 0 ? 1u : 0u) << i;
    signs[byte] = static_cast<std::byte>(bits);
  }
  const double squared = squared_norm(x, projection_->columns());
  if (squared == 0) return 0;
  double scale = std::sqrt(std::numbers::pi / 2 * squared) / static_cast<double>(n_signs());
  if (scale_ == Scale::kExact) {
    const double total = ordered_sum(
        n_signs(), [&](std::int64_t i) { return std::abs(static_cast<double>(scratch[i])); });
    // A projection of few rows may miss the vector; then nothing better is known than the norm.
    const double exact = total > 0 ? squared / total : scale;
    scale = std::min(exact, kMostCorrection * scale);
  }
  return to_magnitude(static_cast<float>(scale));
}

SignSketch make_sign_sketch(std::int64_t n_signs, std::int64_t dims, std::uint64_t seed,
                            bool as_published) {
  const auto kind = as_published ? ProjectionKind::kGaussian : ProjectionKind::kOrthogonal;
  return {make_projection(n_signs, dims, seed, kind),
          as_published ? SignSketch::Scale::kNorm : SignSketch::Scale::kExact};
}

}  // namespace kvpool::methods
