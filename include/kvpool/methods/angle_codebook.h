#pragma once

#include <cstdint>
#include <vector>

namespace kvpool::methods {

/// Quantises the angle of points (x, y) of one level of polar coordinates. Codes are found by
/// comparing products, not angles: no function of the C library has a say in a code.
class AngleCodebook {
 public:
  /// Angles uniform over the whole circle, 1 <= bits <= 8: equal cells.
  static AngleCodebook whole_circle(int bits);
  /// Angles in [0, pi / 2] with density sin(2 angle)^power, 0 <= bits <= 8: Lloyd-Max levels.
  static AngleCodebook first_quadrant(double power, int bits);

  int bits() const noexcept { return bits_; }
  std::uint8_t code(float x, float y) const noexcept;

  /// By code; at least 16 floats, as the kernels want.
  const float* cosines() const noexcept { return cosines_.data(); }
  const float* sines() const noexcept { return sines_.data(); }

 private:
  struct Direction {
    float x, y;
  };

  AngleCodebook(int bits, bool whole_circle, const std::vector<double>& levels,
                const std::vector<double>& boundaries);

  int bits_;
  bool whole_circle_;
  std::vector<float> cosines_;
  std::vector<float> sines_;
  /// Between the cells of the first quadrant, ascending.
  std::vector<Direction> boundaries_;
};

}  // namespace kvpool::methods
