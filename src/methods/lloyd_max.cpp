#include "kvpool/methods/lloyd_max.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvpool::methods {
namespace {

/// Integrals of a density and of x times it from `low`, tabulated once, so that the mean of any
/// interval takes two look-ups.
class CumulativeMoments {
 public:
  CumulativeMoments(const std::function<double(double)>& density, double low, double high)
      : low_(low), step_((high - low) / kCells), mass_(kCells + 1), moment_(kCells + 1) {
    for (int i = 0; i < kCells; ++i) {
      const double x = low + (i + 0.5) * step_;
      const double mass = density(x) * step_;
      const auto at = static_cast<std::size_t>(i);
      mass_[at + 1] = mass_[at] + mass;
      moment_[at + 1] = moment_[at] + mass * x;
    }
  }

  /// Mean of [a, b], its middle where it holds no mass.
  double mean(double a, double b) const {
    const double mass = at(mass_, b) - at(mass_, a);
    return mass > 0 ? (at(moment_, b) - at(moment_, a)) / mass : (a + b) / 2;
  }

 private:
  static constexpr int kCells = 20000;

  double at(const std::vector<double>& table, double x) const {
    const double position = std::clamp((x - low_) / step_, 0.0, static_cast<double>(kCells));
    const int cell = std::min(static_cast<int>(position), kCells - 1);
    const auto i = static_cast<std::size_t>(cell);
    return table[i] + (position - cell) * (table[i + 1] - table[i]);
  }

  double low_;
  double step_;
  std::vector<double> mass_;
  std::vector<double> moment_;
};

/// Levels of a fine quantiser are spread as density^(1/3) (Panter, Dite 1951): a start from which
/// few rounds are left.
std::vector<double> companded_levels(const std::function<double(double)>& density, double low,
                                     double high, int n_levels) {
  constexpr int kCells = 4000;
  const double step = (high - low) / kCells;
  std::vector<double> mass(kCells + 1);
  for (int i = 0; i < kCells; ++i) {
    const auto at = static_cast<std::size_t>(i);
    mass[at + 1] = mass[at] + std::cbrt(density(low + (i + 0.5) * step));
  }
  std::vector<double> levels;
  for (int level = 0; level < n_levels; ++level) {
    const double wanted = mass.back() * (level + 0.5) / n_levels;
    const auto above = std::upper_bound(mass.begin(), mass.end(), wanted);
    levels.push_back(low + step * static_cast<double>(above - mass.begin()));
  }
  return levels;
}

float round_to_eleven_bits(double value) {
  if (value == 0) return 0;
  const double unit = std::exp2(std::floor(std::log2(std::abs(value))) - 10);
  return static_cast<float>(std::nearbyint(value / unit) * unit);
}

}  // namespace

std::vector<float> lloyd_max(const std::function<double(double)>& density, double low, double high,
                             int n_levels) {
  constexpr int kMaxRounds = 500;
  const double enough = 1e-9 * (high - low);
  const CumulativeMoments moments(density, low, high);
  std::vector<double> levels = companded_levels(density, low, high, n_levels);
  double largest_shift = high - low;
  for (int round = 0; round < kMaxRounds && largest_shift > enough; ++round) {
    largest_shift = 0;
    double lower = low;
    for (std::size_t i = 0; i < levels.size(); ++i) {
      const double upper = i + 1 < levels.size() ? (levels[i] + levels[i + 1]) / 2 : high;
      const double mean = moments.mean(lower, upper);
      largest_shift = std::max(largest_shift, std::abs(mean - levels[i]));
      lower = upper;
      levels[i] = mean;
    }
  }
  std::vector<float> rounded(levels.size());
  std::transform(levels.begin(), levels.end(), rounded.begin(), round_to_eleven_bits);
  return rounded;
}

}  // namespace kvpool::methods
