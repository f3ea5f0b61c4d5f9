#include "kvpool/methods/codebook.h"

#include <cmath>

#include "kvpool/methods/lloyd_max.h"

namespace kvpool::methods {

Codebook::Codebook(const std::function<double(double)>& density, double low, double high, int bits)
    : bits_(bits), levels_(lloyd_max(density, low, high, 1 << bits)) {
  for (std::size_t i = 0; i + 1 < levels_.size(); ++i) {
    midpoints_.push_back((levels_[i] + levels_[i + 1]) / 2);
  }
  levels_.resize(std::max<std::size_t>(levels_.size(), kernels::kRowPadding));
}

Codebook Codebook::of_unit_vectors(std::int64_t dims, int bits) {
  constexpr std::int64_t kNearlyNormal = 64;
  if (dims >= kNearlyNormal) {
    return Codebook([](double x) { return std::exp(-x * x / 2); }, -6, 6, bits);
  }
  // (1 - x^2)^((dims - 3) / 2) on [-1, 1]: in one and two dims the mass lies at the ends, where the
  // smallest base keeps it finite; in one dim that is all there is.
  constexpr double kSmallestBase = 1e-6;
  const double end = std::sqrt(static_cast<double>(dims));
  const double power = dims == 1 ? -2 : static_cast<double>(dims - 3) / 2;
  return Codebook(
      [=](double x) { return std::pow(std::max(kSmallestBase, 1 - x * x / (end * end)), power); },
      -end, end, bits);
}

}  // namespace kvpool::methods
