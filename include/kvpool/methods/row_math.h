#pragma once

#include <cstdint>

namespace kvpool::methods {

// Sums over a vector in one fixed order, which compilers can vectorise: the same bits everywhere.

inline constexpr std::int64_t kSumLanes = 8;

/// sum_i term(i) for i in [0, n).
template <class Term>
double ordered_sum(std::int64_t n, Term term) noexcept {
  double lanes[kSumLanes] = {};
  std::int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
    for (std::int64_t j = 0; j < kSumLanes; ++j) lanes[j] += term(i + j);
  }
  for (std::int64_t j = 0; i < n; ++i, ++j) lanes[j] += term(i);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

inline double dot(const float* a, const float* b, std::int64_t n) noexcept {
  return ordered_sum(
      n, [=](std::int64_t i) { return static_cast<double>(a[i]) * static_cast<double>(b[i]); });
}

inline double squared_norm(const float* a, std::int64_t n) noexcept { return dot(a, a, n); }

}  // namespace kvpool::methods
