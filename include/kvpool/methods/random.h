#pragma once

#include <cstdint>

namespace kvpool::methods {

/// A stream of numbers that is the same on every machine: SplitMix64 (Steele, Lea, Flood 2014), and
/// no function of the C library whose last bit may differ.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  /// In [0, 1), with 53 random bits.
  double uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1p-53; }

  /// Close to a standard normal number: twelve uniform ones less their mean. Within 6 by nature.
  double normal() noexcept {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

  bool coin() noexcept { return (next() >> 63) != 0; }

 private:
  std::uint64_t state_;
};

}  // namespace kvpool::methods
