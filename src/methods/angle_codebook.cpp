#include "kvpool/methods/angle_codebook.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "kvpool/kernels/row_kernels.h"
#include "kvpool/methods/lloyd_max.h"

namespace kvpool::methods {
namespace {
constexpr double kQuarter = std::numbers::pi / 2;
}

AngleCodebook::AngleCodebook(int bits, bool whole_circle, const std::vector<double>& levels,
                             const std::vector<double>& boundaries)
    : bits_(bits), whole_circle_(whole_circle) {
  for (const double level : levels) {
    cosines_.push_back(static_cast<float>(std::cos(level)));
    sines_.push_back(static_cast<float>(std::sin(level)));
  }
  for (const double boundary : boundaries) {
    boundaries_.push_back(
        {static_cast<float>(std::cos(boundary)), static_cast<float>(std::sin(boundary))});
  }
  const auto padded = std::max<std::size_t>(levels.size(), kernels::kRowPadding);
  cosines_.resize(padded);
  sines_.resize(padded);
}

AngleCodebook AngleCodebook::whole_circle(int bits) {
  const int n = 1 << bits;
  const double cell = 4 * kQuarter / n;
  std::vector<double> levels, boundaries;
  for (int i = 0; i < n; ++i) levels.push_back((i + 0.5) * cell);
  for (int i = 1; i < n / 4; ++i) boundaries.push_back(i * cell);
  return {bits, true, levels, boundaries};
}

AngleCodebook AngleCodebook::first_quadrant(double power, int bits) {
  const auto density = [power](double angle) { return std::pow(std::sin(2 * angle), power); };
  const auto found = lloyd_max(density, 0, kQuarter, 1 << bits);
  const std::vector<double> levels(found.begin(), found.end());
  std::vector<double> boundaries;
  for (std::size_t i = 0; i + 1 < levels.size(); ++i) {
    boundaries.push_back((levels[i] + levels[i + 1]) / 2);
  }
  return {bits, false, levels, boundaries};
}

std::uint8_t AngleCodebook::code(float x, float y) const noexcept {
  unsigned code = 0;
  if (whole_circle_) {
    if (bits_ == 1) return y < 0 ? 1 : 0;
    // Turn the point into the first quadrant; each quadrant has as many cells.
    const unsigned quadrant = y < 0 ? (x < 0 ? 2 : 3) : (x < 0 ? 1 : 0);
    if (quadrant == 1 || quadrant == 3) std::swap(x, y);
    x = std::abs(x);
    y = std::abs(y);
    code = quadrant << (bits_ - 2);
  }
  // (x, y) is past a boundary if it lies to its left.
  unsigned first = 0;
  for (auto step = static_cast<unsigned>(boundaries_.size() + 1) / 2; step != 0; step /= 2) {
    const Direction boundary = boundaries_[first + step - 1];
    first += y * boundary.x > x * boundary.y ? step : 0;
  }
  return static_cast<std::uint8_t>(code + first);
}

}  // namespace kvpool::methods
