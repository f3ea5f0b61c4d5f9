// Vector loops of paged attention over rows of floats. Included once a target.
#if defined(KVPOOL_PAGED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPOOL_PAGED_ROWS_INL_H_
#undef KVPOOL_PAGED_ROWS_INL_H_
#else
#define KVPOOL_PAGED_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "float_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
// Arrays of vectors want a length that is known; one lane has nothing to shuffle.
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
using D4 = hn::CappedTag<float, 4>;

inline constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));

// Registers decide how many tokens (rows of keys) and columns (of values) are in flight beside up
// to four query rows.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
inline constexpr int kTileTokens = 2;
inline constexpr int kTileColumns = 2;
#else
inline constexpr int kTileTokens = 4;
inline constexpr int kTileColumns = 4;
#endif

/// Memory that is wanted soon, fetched into the second-level cache bit by bit while something else
/// is computed: each step fetches `bytes` more.
struct Ahead {
  const std::byte* at;
  std::int64_t bytes;

  /// Covers `size` bytes in `steps` steps.
  static Ahead over(const std::byte* data, std::int64_t size, std::int64_t steps) {
    if (data == nullptr) return {nullptr, 0};
    return {data, (size / 64 + steps - 1) / steps * 64};
  }
  Ahead after(std::int64_t steps) const { return {at + steps * bytes, bytes}; }

  HWY_INLINE void step() {
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    at += bytes;
  }
};

/// Adds a vector's 128-bit blocks.
template <class DV>
HWY_INLINE hn::Vec<D4> sum_of_blocks([[maybe_unused]] DV d, hn::Vec<DV> v) {
  if constexpr (hn::MaxLanes(DV()) == 4) {
    return v;
  } else {
    const hn::Half<DV> half;
    return sum_of_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

/// The sums of four vectors, one a lane.
HWY_INLINE hn::Vec<D4> sums_of_four(V a, V b, V c, V d) {
  using Pairs = hn::Repartition<double, D>;
  const V ab = hn::Add(hn::InterleaveLower(D(), a, b), hn::InterleaveUpper(D(), a, b));
  const V cd = hn::Add(hn::InterleaveLower(D(), c, d), hn::InterleaveUpper(D(), c, d));
  const auto ab2 = hn::BitCast(Pairs(), ab);
  const auto cd2 = hn::BitCast(Pairs(), cd);
  const V all = hn::Add(hn::BitCast(D(), hn::InterleaveLower(Pairs(), ab2, cd2)),
                        hn::BitCast(D(), hn::InterleaveUpper(Pairs(), ab2, cd2)));
  return sum_of_blocks(D(), all);
}

/// scores[r][t] = <queries[r], rows[t]> for R queries and T rows of `width` numbers, a multiple of
/// kLanes.
template <class Rows, int R, int T>
HWY_INLINE void score_tile(const float* HWY_RESTRICT queries, std::int64_t query_stride,
                           const typename Rows::Number* HWY_RESTRICT rows, std::int64_t row_stride,
                           std::int64_t width, float* HWY_RESTRICT scores,
                           std::int64_t score_stride) {
  V sums[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) sums[r][t] = hn::Zero(D());
  }
  for (std::int64_t j = 0; j < width; j += kLanes) {
    V row[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) row[t] = Rows::load(D(), rows + t * row_stride + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V query = hn::LoadU(D(), queries + r * query_stride + j);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[r][t] = hn::MulAdd(query, row[t], sums[r][t]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const auto four = sums_of_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    float* to = scores + r * score_stride;
    if constexpr (T == 4) {
      hn::StoreU(four, D4(), to);
    } else if constexpr (T == 2) {
      const hn::CappedTag<float, 2> two;
      hn::StoreU(hn::LowerHalf(two, four), two, to);
    } else {
      *to = hn::GetLane(four);
    }
  }
}

template <class Rows, int R>
HWY_INLINE void score_rows(const float* queries, std::int64_t query_stride,
                           const typename Rows::Number* rows, std::int64_t row_stride,
                           std::int64_t width, std::int64_t n_rows, Ahead ahead, float* scores,
                           std::int64_t score_stride) {
  std::int64_t t = 0;
  for (; t + kTileTokens <= n_rows; t += kTileTokens) {
    ahead.step();
    score_tile<Rows, R, kTileTokens>(queries, query_stride, rows + t * row_stride, row_stride,
                                     width, scores + t, score_stride);
  }
  for (; t < n_rows; ++t) {
    score_tile<Rows, R, 1>(queries, query_stride, rows + t * row_stride, row_stride, width,
                           scores + t, score_stride);
  }
}

/// Tokens of a page of values.
struct Run {
  const std::byte* rows;  // of pages of codes: the head
  std::int64_t n_rows;
  Ahead ahead;  // to fetch meanwhile: a step for each row and tile of columns (or quad of codes)
};

/// sums[r] += weights[r] . rows, for R rows of weights and C vectors of columns.
template <class Rows, int R, int C>
HWY_INLINE void add_tile(const float* weights, std::int64_t weight_stride, const Run* runs,
                         std::int64_t n_runs, std::int64_t row_stride, std::int64_t column,
                         float* HWY_RESTRICT sums, std::int64_t sum_stride) {
  V sum[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      sum[r][c] = hn::LoadU(D(), sums + r * sum_stride + column + c * kLanes);
    }
  }
  for (std::int64_t i = 0; i < n_runs; ++i) {
    Ahead ahead = runs[i].ahead.after(column / (kTileColumns * kLanes) * runs[i].n_rows);
    const auto* row = reinterpret_cast<const typename Rows::Number*>(runs[i].rows) + column;
    for (std::int64_t t = 0; t < runs[i].n_rows; ++t, row += row_stride, ++weights) {
      ahead.step();
      V value[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) value[c] = Rows::load(D(), row + c * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = hn::Set(D(), weights[r * weight_stride]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[r][c] = hn::MulAdd(weight, value[c], sum[r][c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      hn::StoreU(sum[r][c], D(), sums + r * sum_stride + column + c * kLanes);
    }
  }
}

/// All columns; `width` is a multiple of kLanes.
template <class Rows, int R>
HWY_INLINE void add_rows(const float* weights, std::int64_t weight_stride, const Run* runs,
                         std::int64_t n_runs, std::int64_t row_stride, std::int64_t width,
                         float* sums, std::int64_t sum_stride) {
  std::int64_t j = 0;
  for (; j + kTileColumns * kLanes <= width; j += kTileColumns * kLanes) {
    add_tile<Rows, R, kTileColumns>(weights, weight_stride, runs, n_runs, row_stride, j, sums,
                                    sum_stride);
  }
  for (; j < width; j += kLanes) {
    add_tile<Rows, R, 1>(weights, weight_stride, runs, n_runs, row_stride, j, sums, sum_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
#endif
HWY_AFTER_NAMESPACE();

#endif
