#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kvpool/kernels/row_kernels.h"

namespace kvpool::methods {

/// The 2^bits levels of a scalar quantiser.
class Codebook {
 public:
  /// Lloyd-Max levels of a density on [low, high], 0 <= bits <= 8.
  Codebook(const std::function<double(double)>& density, double low, double high, int bits);

  /// For a coordinate of a random unit vector of `dims` numbers, times sqrt(dims): nearly standard
  /// normal, and exactly the density of the sphere below 64 dims.
  static Codebook of_unit_vectors(std::int64_t dims, int bits);

  int bits() const noexcept { return bits_; }
  /// Ascending; at least 16 floats, as the kernels want.
  const float* levels() const noexcept { return levels_.data(); }
  float level(std::uint8_t code) const noexcept { return levels_[code]; }

  /// The nearest level; a tie goes down.
  std::uint8_t code(float value) const noexcept {
    unsigned code = 0;
    for (unsigned step = 1u << bits_ >> 1; step != 0; step >>= 1) {
      code += value > midpoints_[code + step - 1] ? step : 0;
    }
    return static_cast<std::uint8_t>(code);
  }

 private:
  int bits_;
  std::vector<float> levels_;
  std::vector<float> midpoints_;
};

}  // namespace kvpool::methods
