// Vector loops of paged attention over pages of codes (formats/page_layout.h): tokens lie across
// lanes. Included once a target.
#if defined(KVPOOL_PAGED_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPOOL_PAGED_CODES_INL_H_
#undef KVPOOL_PAGED_CODES_INL_H_
#else
#define KVPOOL_PAGED_CODES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvpool/formats/page_layout.h"
#include "paged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE  // as in paged_rows-inl.h
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;

inline constexpr std::int64_t kGroupQuads = formats::kPageGroup / 4;

// Query rows in flight while values are added up: four sums each.
inline constexpr int kCodeRows = kTileColumns;

/// A query row for pages of codes. Over a group of 64 dims
///   <q, key> = minimum * sum(q) + scale * <q, codes>,
/// and q is taken as step * (256 * a + b) with integers a and b of eight bits, so its error is
/// 2^-15 of the group's largest number, below that of half precision. Dots give step * <.., codes>
/// exactly.
struct CodeQuery {
  const std::uint32_t* a;  // [quads]
  const std::uint32_t* b;  // [quads]
  const float* steps;      // [groups]
  const float* sums;       // [groups]
  const float* numbers;    // [quads * 4]
};

// Ways to multiply codes and a query: Sum adds quads up for one vector of tokens.

/// 4 x 8 bits at once; the instruction is VNNI's.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
struct VnniDot {
  static constexpr float kLargest = 127 * 256;
  struct Sum {
    VI high;
    VI low;

    HWY_INLINE void clear() { high = low = hn::Zero(DI()); }
    HWY_INLINE void add(VU codes, const CodeQuery& query, std::int64_t quad) {
      multiply_add(high.raw, codes.raw, query.a + quad);
      multiply_add(low.raw, codes.raw, query.b + quad);
    }
    HWY_INLINE V total(const CodeQuery& query, std::int64_t group) const {
      const VI sum = hn::Add(hn::ShiftLeft<8>(high), low);
      return hn::Mul(hn::ConvertTo(D(), sum), hn::Set(D(), query.steps[group]));
    }
  };
  // As assembly: the instruction is asked for at run time, beside the target's own.
  static HWY_INLINE void multiply_add(__m512i& sum, __m512i codes, const std::uint32_t* numbers) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*numbers));
  }
  static HWY_INLINE void split(const std::int32_t (&q)[4], std::uint32_t& a, std::uint32_t& b) {
    a = b = 0;
    for (int i = 0; i < 4; ++i) {
      const std::int32_t high = (q[i] + 128) >> 8;
      const std::int32_t low = q[i] - high * 256;
      a |= static_cast<std::uint32_t>(high & 0xff) << (8 * i);
      b |= static_cast<std::uint32_t>(low & 0xff) << (8 * i);
    }
  }
};
#endif

#if HWY_ARCH_X86
/// 2 x 16 bits at once, on any x86.
struct PairDot {
  static constexpr float kLargest = 127 * 256;
  struct Sum {
    VI sum;

    HWY_INLINE void clear() { sum = hn::Zero(DI()); }
    HWY_INLINE void add(VU codes, const CodeQuery& query, std::int64_t quad) {
      const hn::Repartition<std::int16_t, D> pairs;
      const VU bytes = hn::Set(DU(), 0x00ff00ff);
      const auto even = hn::BitCast(pairs, hn::And(codes, bytes));
      const auto odd = hn::BitCast(pairs, hn::And(hn::ShiftRight<8>(codes), bytes));
      VI none = hn::Zero(DI());
      sum = hn::ReorderWidenMulAccumulate(
          DI(), even, hn::BitCast(pairs, hn::Set(DU(), query.a[quad])), sum, none);
      sum = hn::ReorderWidenMulAccumulate(
          DI(), odd, hn::BitCast(pairs, hn::Set(DU(), query.b[quad])), sum, none);
    }
    HWY_INLINE V total(const CodeQuery& query, std::int64_t group) const {
      return hn::Mul(hn::ConvertTo(D(), sum), hn::Set(D(), query.steps[group]));
    }
  };
  static HWY_INLINE void split(const std::int32_t (&q)[4], std::uint32_t& a, std::uint32_t& b) {
    const auto pair = [](std::int32_t low, std::int32_t high) {
      return static_cast<std::uint32_t>(low & 0xffff) | static_cast<std::uint32_t>(high) << 16;
    };
    a = pair(q[0], q[2]);
    b = pair(q[1], q[3]);
  }
};
#endif

/// In fp32, where integers of eight bits gain nothing.
struct FloatDot {
  static constexpr float kLargest = 0;
  struct Sum {
    V sum;

    HWY_INLINE void clear() { sum = hn::Zero(D()); }
    HWY_INLINE void add(VU codes, const CodeQuery& query, std::int64_t quad) {
      const float* q = query.numbers + 4 * quad;
      const VU byte = hn::Set(DU(), 0xff);
      step(hn::And(codes, byte), q[0]);
      step(hn::And(hn::ShiftRight<8>(codes), byte), q[1]);
      step(hn::And(hn::ShiftRight<16>(codes), byte), q[2]);
      step(hn::ShiftRight<24>(codes), q[3]);
    }
    HWY_INLINE void step(VU code, float q) {
      sum = hn::MulAdd(hn::ConvertTo(D(), hn::BitCast(DI(), code)), hn::Set(D(), q), sum);
    }
    HWY_INLINE V total(const CodeQuery&, std::int64_t) const { return sum; }
  };
  static HWY_INLINE void split(const std::int32_t (&)[4], std::uint32_t&, std::uint32_t&) {}
};

/// Fills what a CodeQuery points to. `numbers` is padded with zeros to `quads` * 4.
template <class Dot>
HWY_INLINE void prepare_query(const float* numbers, std::int64_t quads, std::uint32_t* a,
                              std::uint32_t* b, float* steps, float* sums) {
  for (std::int64_t first = 0, g = 0; first < quads; first += kGroupQuads, ++g) {
    const std::int64_t last = std::min(quads, first + kGroupQuads);
    V sum = hn::Zero(D());
    V largest = hn::Zero(D());
    for (std::int64_t j = 4 * first; j < 4 * last; j += kLanes) {
      const V q = hn::LoadU(D(), numbers + j);
      sum = hn::Add(sum, q);
      largest = hn::Max(largest, hn::Abs(q));
    }
    sums[g] = hn::GetLane(hn::SumOfLanes(D(), sum));
    if constexpr (Dot::kLargest > 0) {
      const float most = hn::GetLane(hn::MaxOfLanes(D(), largest));
      // Below the first bound 1 / step overflows. A query that is not finite has no integers; its
      // sum and step make every score NaN.
      const bool fine = most > 1e-30f && most < 1e38f;
      steps[g] = fine ? most / Dot::kLargest : (most < 1e38f ? 0.0f : sums[g] - sums[g]);
      const V inverse = hn::Set(D(), fine ? Dot::kLargest / most : 0.0f);
      for (std::int64_t j = 4 * first; j < 4 * last; j += kLanes) {
        alignas(64) std::int32_t q[kLanes];
        hn::Store(hn::NearestInt(hn::Mul(hn::LoadU(D(), numbers + j), inverse)), DI(), q);
        for (std::int64_t i = 0; i < kLanes; i += 4) {
          const std::int32_t quad[4] = {q[i], q[i + 1], q[i + 2], q[i + 3]};
          Dot::split(quad, a[(j + i) / 4], b[(j + i) / 4]);
        }
      }
    }
  }
}

/// The codes of quad U of eight, one a byte, from the tokens' words.
template <int bits, int U>
HWY_INLINE VU quad_of(const std::uint32_t* words, std::int64_t lanes) {
  const auto word = [&](std::int64_t w) HWY_ATTR { return hn::LoadU(DU(), words + w * lanes); };
  if constexpr (bits == 8) {
    return word(U);
  } else if constexpr (bits == 3) {
    const VU low = hn::And(hn::ShiftRight<2 * (U % 4)>(word(U / 4)), hn::Set(DU(), 0x03030303));
    const VU high = hn::And(hn::ShiftRight<U>(word(2)), hn::Set(DU(), 0x01010101));
    return hn::Or(low, hn::ShiftLeft<2>(high));
  } else {
    constexpr int kQuads = 8 / bits;
    constexpr std::uint32_t kMask = 0x01010101u * ((1u << bits) - 1);
    return hn::And(hn::ShiftRight<bits*(U % kQuads)>(word(U / kQuads)), hn::Set(DU(), kMask));
  }
}

/// One dim of a quad's codes as floats.
template <int i>
HWY_INLINE V dim_of(VU codes) {
  VU code = codes;
  if constexpr (i > 0) code = hn::ShiftRight<8 * i>(code);
  if constexpr (i < 3) code = hn::And(code, hn::Set(DU(), 0xff));
  return hn::ConvertTo(D(), hn::BitCast(DI(), code));
}

/// Eight quads' share of R queries' sums; the last `8 - n` are not there.
template <class Dot, int bits, int R, int U = 0>
HWY_INLINE void dot_quads(const std::uint32_t* words, std::int64_t lanes, std::int64_t n,
                          const CodeQuery* queries, std::int64_t quad,
                          typename Dot::Sum (&sums)[R]) {
  if constexpr (U < 8) {
    if (U >= n) return;
    const VU codes = quad_of<bits, U>(words, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r].add(codes, queries[r], quad + U);
    dot_quads<Dot, bits, R, U + 1>(words, lanes, n, queries, quad, sums);
  }
}

HWY_INLINE V load_halves(const std::byte* at) {
  return Fp16Rows::load(reinterpret_cast<const std::uint16_t*>(at));
}

/// scores[r][t] for the tokens of whole vectors that cover first .. last of a page's head; what it
/// writes outside of that range means nothing. `scores` is token 0's place.
template <class Dot, int bits, int R>
HWY_INLINE void score_codes(const CodeQuery* queries, const std::byte* head,
                            const formats::PageLayout& layout, std::int64_t first,
                            std::int64_t last, float* scores, std::int64_t score_stride) {
  const std::int64_t lanes = layout.lanes();
  const std::int64_t n_words = layout.words();
  const std::int64_t block_size = layout.shape.block_size;
  const std::int64_t quads = (layout.shape.head_dim + 3) / 4;
  const std::byte* scales = head + layout.scales_offset();
  const std::byte* minimums = head + layout.minimums_offset();
  for (std::int64_t t = first / kLanes * kLanes; t < last; t += kLanes) {
    const auto* words =
        reinterpret_cast<const std::uint32_t*>(head) + (t / lanes * n_words * lanes + t % lanes);
    V score[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) score[r] = hn::Zero(D());
    for (std::int64_t from = 0, g = 0; from < quads; from += kGroupQuads, ++g) {
      typename Dot::Sum sums[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r].clear();
      for (std::int64_t k = from; k < std::min(quads, from + kGroupQuads); k += 8) {
        dot_quads<Dot, bits, R>(words + k / 8 * bits * lanes, lanes, quads - k, queries, k, sums);
      }
      const V scale = load_halves(scales + (g * block_size + t) * 2);
      const V minimum = load_halves(minimums + (g * block_size + t) * 2);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        score[r] = hn::MulAdd(sums[r].total(queries[r], g), scale, score[r]);
        score[r] = hn::MulAdd(hn::Set(D(), queries[r].sums[g]), minimum, score[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) hn::StoreU(score[r], D(), scores + r * score_stride + t);
  }
}

/// Pages of codes one after the other: of page i the tokens first .. last (whole vectors), whose
/// weights follow the page's before.
struct CodeRun {
  const Run* pages;  // n_rows is the end of the tokens that have weights
  std::int64_t n_pages;
  formats::PageLayout layout;
};

/// scaled[r][g][t] = weights[r][t] * scale[g][t], and sums[r][dims of g] += weights[r] .
/// minimums[g]. Weights are zero where there is no token, and what lies there in a page does not
/// count.
template <int R>
HWY_INLINE void scale_weights(const CodeRun& run, const float* weights, std::int64_t weight_stride,
                              std::int64_t split_width, float* scaled, float* sums,
                              std::int64_t sum_stride) {
  const formats::PageLayout& layout = run.layout;
  const std::int64_t block_size = layout.shape.block_size;
  for (std::int64_t g = 0; g < layout.groups(); ++g) {
    V minimum_sums[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) minimum_sums[r] = hn::Zero(D());
    for (std::int64_t i = 0; i < run.n_pages; ++i) {
      const std::byte* scales = run.pages[i].rows + layout.scales_offset() + g * block_size * 2;
      const std::byte* minimums = run.pages[i].rows + layout.minimums_offset() + g * block_size * 2;
      for (std::int64_t t = 0; t < run.pages[i].n_rows; t += kLanes) {
        const V scale = load_halves(scales + t * 2);
        const V minimum = load_halves(minimums + t * 2);
        const std::int64_t at = i * block_size + t;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V weight = hn::LoadU(D(), weights + r * weight_stride + at);
          const auto there = hn::Ne(weight, hn::Zero(D()));
          const V product = hn::IfThenElseZero(there, hn::Mul(weight, scale));
          hn::StoreU(product, D(), scaled + (r * layout.groups() + g) * split_width + at);
          minimum_sums[r] =
              hn::Add(minimum_sums[r], hn::IfThenElseZero(there, hn::Mul(weight, minimum)));
        }
      }
    }
    const std::int64_t first = g * formats::kPageGroup;
    for (int r = 0; r < R; ++r) {
      const V sum = hn::Set(D(), hn::GetLane(hn::SumOfLanes(D(), minimum_sums[r])));
      float* to = sums + r * sum_stride + first;
      for (std::int64_t j = 0; j < layout.group_size(g); j += kLanes) {
        hn::StoreU(hn::Add(sum, hn::LoadU(D(), to + j)), D(), to + j);
      }
    }
  }
}

/// sums[r][4 quads' dims] += scaled[r] . codes, for quads U .. of eight.
template <int bits, int R, int U = 0>
HWY_INLINE void add_quads(const CodeRun& run, std::int64_t quad, std::int64_t n,
                          const float* scaled, std::int64_t scaled_stride, float* sums,
                          std::int64_t sum_stride) {
  if constexpr (U < 8) {
    if (U >= n) return;
    const std::int64_t lanes = run.layout.lanes();
    const std::int64_t run_words = run.layout.words() * lanes;
    const std::int64_t block_size = run.layout.shape.block_size;
    V sum[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[r][i] = hn::Zero(D());
    }
    for (std::int64_t page = 0; page < run.n_pages; ++page) {
      const auto* words =
          reinterpret_cast<const std::uint32_t*>(run.pages[page].rows) + quad / 8 * bits * lanes;
      const float* weights = scaled + page * block_size;
      for (std::int64_t t = 0; t < run.pages[page].n_rows; t += kLanes) {
        const VU codes = quad_of<bits, U>(words + t / lanes * run_words + t % lanes, lanes);
        const V dim0 = dim_of<0>(codes);
        const V dim1 = dim_of<1>(codes);
        const V dim2 = dim_of<2>(codes);
        const V dim3 = dim_of<3>(codes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V weight = hn::LoadU(D(), weights + r * scaled_stride + t);
          sum[r][0] = hn::MulAdd(weight, dim0, sum[r][0]);
          sum[r][1] = hn::MulAdd(weight, dim1, sum[r][1]);
          sum[r][2] = hn::MulAdd(weight, dim2, sum[r][2]);
          sum[r][3] = hn::MulAdd(weight, dim3, sum[r][3]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* to = sums + r * sum_stride + 4 * (quad + U);
      const auto four = sums_of_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      hn::StoreU(hn::Add(four, hn::LoadU(D4(), to)), D4(), to);
    }
    add_quads<bits, R, U + 1>(run, quad, n, scaled, scaled_stride, sums, sum_stride);
  }
}

/// sums[r] += weights[r] . values of a run of pages. `scaled` has room for [R, groups,
/// split_width].
template <int bits, int R>
HWY_INLINE void add_codes(const CodeRun& run, const float* weights, std::int64_t weight_stride,
                          std::int64_t split_width, float* scaled, float* sums,
                          std::int64_t sum_stride) {
  scale_weights<R>(run, weights, weight_stride, split_width, scaled, sums, sum_stride);
  const std::int64_t quads = (run.layout.shape.head_dim + 3) / 4;
  for (std::int64_t k = 0; k < quads; k += 8) {
    add_quads<bits, R>(run, k, quads - k, scaled + k / kGroupQuads * split_width,
                       run.layout.groups() * split_width, sums, sum_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
#endif
HWY_AFTER_NAMESPACE();

#endif
