#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/magnitude.h"

namespace kvpool::methods {

/// Signs of random projections of a vector x, from which inner products with it are estimated:
/// <x, y> ~ scale * <sign(S x), S y> (QJL: Zandieh, Daliri, Han, arXiv:2406.03482).
class SignSketch {
 public:
  enum class Scale : std::uint8_t {
    /// sqrt(pi / 2) / m * |x|: unbiased over random projections, as published.
    kNorm,
    /// |x|^2 / sum |S x|: exact for y = x, whatever the projection drew.
    kExact,
  };

  /// `projection` has m rows.
  SignSketch(std::shared_ptr<const LinearMap> projection, Scale scale) noexcept
      : projection_(std::move(projection)), scale_(scale) {}

  /// The signs of one vector.
  std::int64_t n_signs() const noexcept { return projection_->rows(); }
  std::int64_t row_bytes() const noexcept { return (n_signs() + 7) / 8; }
  const LinearMap& projection() const noexcept { return *projection_; }

  /// Packs the signs of x, a set bit for a positive projection, and returns the scale. `scratch`
  /// has n_signs() floats.
  Magnitude encode(const float* x, std::byte* signs, float* scratch) const noexcept;

  /// What a code of one bit means; 16 floats, as the kernels want.
  static constexpr float kLevels[16] = {-1, 1};

 private:
  /// kExact is kept within this multiple of kNorm: few projections may all be small by chance.
  static constexpr double kMostCorrection = 2;

  std::shared_ptr<const LinearMap> projection_;
  Scale scale_;
};

/// A sketch of `n_signs` signs of vectors of `dims` numbers: orthogonal projections and exact
/// scales, or Gaussian ones and norms as published.
SignSketch make_sign_sketch(std::int64_t n_signs, std::int64_t dims, std::uint64_t seed,
                            bool as_published);

}  // namespace kvpool::methods
