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
#include <cstddef>
#include <cstdint>
#include <limits>

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

// Dims of values in flight beside up to four query rows: as many sums as in rows of floats.
inline constexpr int kCodeDims = kTileColumns;

/// A query row for pages of codes. Over a group of 64 dims
///   <q, key> = minimum * sum(q) + scale * <q, codes>,
/// and q is taken as step * n with integers n of 16 bits, so its error is 2^-16 of the group's
/// largest number, below that of half precision. <n, codes> is exact.
struct CodeQuery {
  const float* numbers;        // [quads * 4], padded with zeros to whole vectors
  const std::uint32_t* codes;  // n as a Dot wants it, one number's room each
  const float* steps;          // [groups]
  const float* sums;           // [groups]
  std::int64_t quads;          // padded
};

/// The largest n: 127 * 256, so that its upper byte, rounded, has eight bits with a sign. The sum
/// of 64 products with codes stays below 2^31.
inline constexpr float kLargestCode = 127 * 256;

// Ways to multiply codes and a query: Sum adds quads up for one vector of tokens.

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
/// 4 x 8 bits at once, by VNNI's instruction: n = 256 * high + low. `codes` are the high bytes of
/// all quads, then the low bytes.
struct VnniDot {
  static constexpr bool kIntegers = true;
  struct Sum {
    VI high;
    VI low;

    HWY_INLINE void clear() { high = low = hn::Zero(DI()); }
    HWY_INLINE void add(VU codes, const CodeQuery& query, std::int64_t quad) {
      multiply_add(high.raw, codes.raw, query.codes + quad);
      multiply_add(low.raw, codes.raw, query.codes + query.quads + quad);
    }
    HWY_INLINE V total(const CodeQuery& query, std::int64_t group) const {
      const VI sum = hn::Add(hn::ShiftLeft<8>(high), low);
      return hn::Mul(hn::ConvertTo(D(), sum), hn::Set(D(), query.steps[group]));
    }
  };
  // As assembly: whether the machine has it is asked at run time, beside the target's own demands.
  static HWY_INLINE void multiply_add(__m512i& sum, __m512i codes, const std::uint32_t* numbers) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*numbers));
  }
  static HWY_INLINE void store(VI n, std::int64_t j, std::int64_t quads, std::uint32_t* codes) {
    const hn::Rebind<std::int8_t, DI> bytes;
    const VI high = hn::ShiftRight<8>(hn::Add(n, hn::Set(DI(), 128)));
    const VI low = hn::Sub(n, hn::ShiftLeft<8>(high));
    auto* to = reinterpret_cast<std::int8_t*>(codes) + j;
    hn::StoreU(hn::DemoteTo(bytes, high), bytes, to);
    hn::StoreU(hn::DemoteTo(bytes, low), bytes, to + 4 * quads);
  }
};
#endif

#if HWY_ARCH_X86
/// 2 x 16 bits at once, on any x86. A quad's `codes` are its dims 0 and 2, then 1 and 3, and two
/// words of no meaning.
struct PairDot {
  static constexpr bool kIntegers = true;
  struct Sum {
    VI sum;

    HWY_INLINE void clear() { sum = hn::Zero(DI()); }
    HWY_INLINE void add(VU codes, const CodeQuery& query, std::int64_t quad) {
      const VU bytes = hn::Set(DU(), 0x00ff00ff);
      multiply_add(hn::And(codes, bytes), query.codes[4 * quad]);
      multiply_add(hn::And(hn::ShiftRight<8>(codes), bytes), query.codes[4 * quad + 1]);
    }
    HWY_INLINE V total(const CodeQuery& query, std::int64_t group) const {
      return hn::Mul(hn::ConvertTo(D(), sum), hn::Set(D(), query.steps[group]));
    }
    HWY_INLINE void multiply_add(VU codes, std::uint32_t pair) {
      const hn::Repartition<std::int16_t, D> pairs;
      VI none = hn::Zero(DI());
      sum = hn::ReorderWidenMulAccumulate(DI(), hn::BitCast(pairs, codes),
                                          hn::BitCast(pairs, hn::Set(DU(), pair)), sum, none);
    }
  };
  static HWY_INLINE void store(VI n, std::int64_t j, std::int64_t, std::uint32_t* codes) {
    const VU numbers = hn::BitCast(DU(), n);
    const VU other = hn::Shuffle1032(numbers);
    hn::StoreU(hn::Or(hn::And(numbers, hn::Set(DU(), 0xffff)), hn::ShiftLeft<16>(other)), DU(),
               codes + j);
  }
};
#endif

/// In fp32, where there are no such instructions.
struct FloatDot {
  static constexpr bool kIntegers = false;
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
};

/// Fills a query's codes, steps and sums; it has `dims` numbers.
template <class Dot>
void prepare_query(const CodeQuery& query, std::int64_t dims, std::uint32_t* codes, float* steps,
                   float* sums) {
  for (std::int64_t first = 0, g = 0; first < dims; first += formats::kPageGroup, ++g) {
    const std::int64_t last = std::min(dims, first + formats::kPageGroup);
    V sum = hn::Zero(D());
    V largest = hn::Zero(D());
    for (std::int64_t j = first; j < last; j += kLanes) {
      const V q = hn::LoadU(D(), query.numbers + j);
      sum = hn::Add(sum, q);
      largest = hn::Max(largest, hn::Abs(q));
    }
    sums[g] = hn::GetLane(hn::SumOfLanes(D(), sum));
    if constexpr (Dot::kIntegers) {
      const float most = hn::GetLane(hn::MaxOfLanes(D(), largest));
      // Smaller ones count as zero: 1 / step would overflow. With a number that is not finite, sum
      // and step are NaN, and so is every score.
      const bool fine = most > 1e-30f && most <= std::numeric_limits<float>::max();
      steps[g] = fine ? most / kLargestCode : sums[g] - sums[g];
      const V inverse = hn::Set(D(), fine ? kLargestCode / most : 0.0f);
      for (std::int64_t j = first; j < last; j += kLanes) {
        const VI n = hn::NearestInt(hn::Mul(hn::LoadU(D(), query.numbers + j), inverse));
        Dot::store(n, j, query.quads, codes);
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

/// Where the codes of a quad lie in the words of a token, and how far to shift them. At run time:
/// a loop for each quad would be most of a target's code.
template <int bits>
struct QuadPlace {
  std::int64_t word;  // with the codes, or their low two bits
  int shift;
  std::int64_t high_word = 0;  // of three bits: with the high ones
  int high_shift = 0;

  explicit QuadPlace(std::int64_t quad) {
    constexpr int kQuads = bits == 3 ? 4 : 8 / bits;
    if constexpr (bits == 3) {
      word = quad / 8 * 3 + quad % 8 / 4;
      high_word = quad / 8 * 3 + 2;
      high_shift = static_cast<int>(quad % 8);
    } else {
      word = quad / kQuads;
    }
    shift = (bits == 3 ? 2 : bits) * static_cast<int>(quad % kQuads);
  }

  /// The quad's codes, one a byte, from a vector of tokens' words.
  HWY_INLINE VU codes(const std::uint32_t* words, std::int64_t lanes) const {
    constexpr std::uint32_t kMask = 0x01010101u * (bits == 3 ? 3 : (1u << bits) - 1);
    const VU all = hn::LoadU(DU(), words + word * lanes);
    const VU low = hn::And(hn::ShiftRightSame(all, shift), hn::Set(DU(), kMask));
    if constexpr (bits != 3) return low;
    const VU high = hn::LoadU(DU(), words + high_word * lanes);
    const VU bit = hn::And(hn::ShiftRightSame(high, high_shift), hn::Set(DU(), 0x01010101));
    return hn::Or(low, hn::ShiftLeft<2>(bit));
  }

  /// The codes of the quad's dim i alone.
  template <int i>
  HWY_INLINE V code(const std::uint32_t* words, std::int64_t lanes) const {
    constexpr std::uint32_t kMask = bits == 3 ? 3 : (1u << bits) - 1;
    const VU all = hn::LoadU(DU(), words + word * lanes);
    VU codes = hn::And(hn::ShiftRightSame(all, 8 * i + shift), hn::Set(DU(), kMask));
    if constexpr (bits == 3) {
      const VU high = hn::LoadU(DU(), words + high_word * lanes);
      const VU bit = hn::And(hn::ShiftRightSame(high, 8 * i + high_shift), hn::Set(DU(), 1));
      codes = hn::Or(codes, hn::ShiftLeft<2>(bit));
    }
    return hn::ConvertTo(D(), hn::BitCast(DI(), codes));
  }
};

/// Eight quads' share of R queries' sums, without a branch, so that sums stay in registers.
template <class Dot, int bits, int R, int U = 0>
HWY_INLINE void dot_quads(const std::uint32_t* words, std::int64_t lanes, const CodeQuery* queries,
                          std::int64_t quad, typename Dot::Sum (&sums)[R]) {
  if constexpr (U < 8) {
    const VU codes = quad_of<bits, U>(words, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r].add(codes, queries[r], quad + U);
    dot_quads<Dot, bits, R, U + 1>(words, lanes, queries, quad, sums);
  }
}

/// Where the words of token t begin; `lanes` is a power of two, and a division would cost more than
/// all the rest of a vector's work.
HWY_INLINE std::int64_t first_word(std::int64_t t, std::int64_t lanes, std::int64_t n_words) {
  const std::int64_t in_run = t & (lanes - 1);
  return (t - in_run) * n_words + in_run;
}

HWY_INLINE V load_halves(const std::byte* at) {
  return Fp16Lanes::load(D(), reinterpret_cast<const std::uint16_t*>(at));
}

/// scores[r][t] for the tokens of whole vectors that cover first .. last of a page's head; what it
/// writes outside of that range means nothing. `scores` is token 0's place.
template <class Dot, int bits, int R>
void score_codes(const CodeQuery* queries, const std::byte* head, const formats::PageLayout& layout,
                 std::int64_t lanes, std::int64_t first, std::int64_t last, Ahead ahead,
                 float* scores, std::int64_t score_stride) {
  const std::int64_t n_words = layout.words();
  const std::int64_t block_size = layout.shape.block_size;
  const std::int64_t quads = (layout.shape.head_dim + 3) / 4;
  const std::byte* scales = head + layout.scales_offset();
  const std::byte* minimums = head + layout.minimums_offset();
  for (std::int64_t t = first / kLanes * kLanes; t < last; t += kLanes) {
    const auto* words =
        reinterpret_cast<const std::uint32_t*>(head) + first_word(t, lanes, n_words);
    V score[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) score[r] = hn::Zero(D());
    for (std::int64_t from = 0, g = 0; from < quads; from += kGroupQuads, ++g) {
      typename Dot::Sum sums[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r].clear();
      const std::int64_t to = std::min(quads, from + kGroupQuads);
      std::int64_t k = from;
      for (; k + 8 <= to; k += 8) {
        ahead.step();
        dot_quads<Dot, bits, R>(words + k / 8 * bits * lanes, lanes, queries, k, sums);
      }
      for (; k < to; ++k) {
        const VU codes = QuadPlace<bits>(k).codes(words, lanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r].add(codes, queries[r], k);
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

/// What depends on how codes are multiplied, apart from the rest of a target's code.
struct CodeScorer {
  void (*prepare)(const CodeQuery& query, std::int64_t dims, std::uint32_t* codes, float* steps,
                  float* sums);
  /// By format from int8 on, and number of queries less one.
  void (*score[4][4])(const CodeQuery* queries, const std::byte* head,
                      const formats::PageLayout& layout, std::int64_t lanes, std::int64_t first,
                      std::int64_t last, Ahead ahead, float* scores, std::int64_t score_stride);
};

template <class Dot>
inline constexpr CodeScorer kCodeScorer = {prepare_query<Dot>,
                                           {{score_codes<Dot, 8, 1>, score_codes<Dot, 8, 2>,
                                             score_codes<Dot, 8, 3>, score_codes<Dot, 8, 4>},
                                            {score_codes<Dot, 4, 1>, score_codes<Dot, 4, 2>,
                                             score_codes<Dot, 4, 3>, score_codes<Dot, 4, 4>},
                                            {score_codes<Dot, 3, 1>, score_codes<Dot, 3, 2>,
                                             score_codes<Dot, 3, 3>, score_codes<Dot, 3, 4>},
                                            {score_codes<Dot, 2, 1>, score_codes<Dot, 2, 2>,
                                             score_codes<Dot, 2, 3>, score_codes<Dot, 2, 4>}}};

/// Pages of one format one after the other; each page's weights follow those of the page before.
struct PageRun {
  Run* pages;
  std::int64_t n_pages;
  formats::PageLayout layout;
  std::int64_t lanes;
};

/// scaled[r][g][t] = weights[r][t] * scale[g][t], and sums[r][dims of g] += weights[r] .
/// minimums[g]. Weights are zero where there is no token, and what lies there in a page does not
/// count.
template <int R>
HWY_INLINE void scale_weights(const PageRun& run, const float* weights, std::int64_t weight_stride,
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

/// sums[r][dim] += scaled[r] . codes, for dims kFirst .. kFirst + kCodeDims of a quad.
template <int bits, int R, int kFirst>
HWY_INLINE void add_dims(const PageRun& run, std::int64_t quad, const float* scaled,
                         std::int64_t scaled_stride, float* sums, std::int64_t sum_stride) {
  const QuadPlace<bits> place(quad);
  const std::int64_t lanes = run.lanes;
  const std::int64_t n_words = run.layout.words();
  V sum[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[r][i] = hn::Zero(D());
  }
  for (std::int64_t page = 0; page < run.n_pages; ++page) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(run.pages[page].rows);
    const float* weights = scaled + page * run.layout.shape.block_size;
    if constexpr (kFirst == 0) run.pages[page].ahead.after(quad).step();
    for (std::int64_t t = 0; t < run.pages[page].n_rows; t += kLanes) {
      const std::uint32_t* tokens = words + first_word(t, lanes, n_words);
      V code[kCodeDims];
      code[0] = place.template code<kFirst>(tokens, lanes);
      code[1] = place.template code<kFirst + 1>(tokens, lanes);
      if constexpr (kCodeDims == 4) {
        code[2] = place.template code<2>(tokens, lanes);
        code[3] = place.template code<3>(tokens, lanes);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        V weight = hn::LoadU(D(), weights + r * scaled_stride + t);
#if HWY_TARGET == HWY_AVX2
        asm("" : "+x"(weight.raw));  // else it is loaded once for each of its two products
#endif
#pragma GCC unroll 4
        for (int i = 0; i < kCodeDims; ++i) sum[r][i] = hn::MulAdd(weight, code[i], sum[r][i]);
      }
    }
  }
  const hn::CappedTag<float, kCodeDims> few;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* to = sums + r * sum_stride + 4 * quad + kFirst;
    const auto all = sums_of_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    if constexpr (kCodeDims == 4) {
      hn::StoreU(hn::Add(all, hn::LoadU(few, to)), few, to);
    } else {
      hn::StoreU(hn::Add(hn::LowerHalf(few, all), hn::LoadU(few, to)), few, to);
    }
  }
}

/// sums[r] += weights[r] . values of a run of pages. `scaled` has room for [R, groups,
/// split_width].
template <int bits, int R>
HWY_INLINE void add_codes(const PageRun& run, const float* weights, std::int64_t weight_stride,
                          std::int64_t split_width, float* scaled, float* sums,
                          std::int64_t sum_stride) {
  scale_weights<R>(run, weights, weight_stride, split_width, scaled, sums, sum_stride);
  const std::int64_t quads = (run.layout.shape.head_dim + 3) / 4;
  for (std::int64_t k = 0; k < quads; ++k) {
    const float* group = scaled + k / kGroupQuads * split_width;
    const std::int64_t group_stride = run.layout.groups() * split_width;
    add_dims<bits, R, 0>(run, k, group, group_stride, sums, sum_stride);
    if constexpr (kCodeDims == 2) {
      add_dims<bits, R, 2>(run, k, group, group_stride, sums, sum_stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
#endif
HWY_AFTER_NAMESPACE();

#endif
