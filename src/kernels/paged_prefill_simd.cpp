// Attention of many queries over pages, as an online softmax over tiles of tokens (FlashAttention,
// arXiv:2205.14135). Highway compiles this file once a target.
//
// A tile of keys and of values is decoded to fp32 once and serves all rows of an item. Scores are
// kept with tokens down and rows (queries) across, so that no step adds up across a vector:
//
//   scores[t][rows]  = sum_d keys[t][d] * queries[d][rows]       broadcast a key, vectors of rows
//   weights[t][rows] = exp2(scores - largest[rows])              a softmax a lane
//   sums[row][dims]  = sum_t weights[t][row] * values[t][dims]   broadcast a weight, vectors of
//   dims
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paged_prefill_simd.cpp"
// Blocks of accumulators are arrays, which vectors of a length unknown to the compiler cannot be
// in.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (KVPOOL_DISABLED_TARGETS | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "decode_rows-inl.h"
#include "float_lanes-inl.h"
#include "kvpool/base/half.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"
#include "paged_attention_common.h"
#include "prefill_plan.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;

constexpr std::int64_t kTokens = PrefillPlan::kTokens;
// Tokens (or rows) whose sums a micro-kernel holds in registers, by two vectors across: what 32 or
// 16 vector registers have room for.
constexpr std::int64_t kSpan = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64 ? 8 : 4;
static_assert(kTokens % kSpan == 0 && PrefillPlan::kRowStep % kSpan == 0);
// Below this many multiplications a call is done before a sleeping thread wakes.
constexpr std::int64_t kSmallWork = 1 << 20;

constexpr float kLog2E = 1.44269504f;

HWY_INLINE std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(D())); }

/// scores[i][across] = sum_d keys[i][d] * queries[d][across], kSpan tokens by `n_vectors` vectors.
template <int n_vectors>
HWY_INLINE void score_block(const float* HWY_RESTRICT keys, std::int64_t key_stride,
                            const float* HWY_RESTRICT queries, std::int64_t dim,
                            float* HWY_RESTRICT scores, std::int64_t row_stride) {
  const D d;
  const std::int64_t n = lanes();
  V sum[kSpan][n_vectors];
  for (auto& token : sum) {
    for (V& vector : token) vector = hn::Zero(d);
  }
  for (std::int64_t j = 0; j < dim; ++j, queries += n_vectors * n) {
    V query[n_vectors];
    for (int v = 0; v < n_vectors; ++v) query[v] = hn::LoadU(d, queries + v * n);
    for (std::int64_t i = 0; i < kSpan; ++i) {
      const V key = hn::Set(d, keys[i * key_stride + j]);
      for (int v = 0; v < n_vectors; ++v) sum[i][v] = hn::MulAdd(key, query[v], sum[i][v]);
    }
  }
  for (std::int64_t i = 0; i < kSpan; ++i) {
    for (int v = 0; v < n_vectors; ++v) hn::StoreU(sum[i][v], d, scores + i * row_stride + v * n);
  }
}

/// sums[i][across] = shrink[i] * sums[i][across] + sum_t weights[t][i] * values[t][across], kSpan
/// rows by `n_vectors` vectors.
template <int n_vectors>
HWY_INLINE void value_block(const float* HWY_RESTRICT weights, std::int64_t row_stride,
                            const float* HWY_RESTRICT values, std::int64_t value_stride,
                            std::int64_t n_tokens, const float* HWY_RESTRICT shrink,
                            float* HWY_RESTRICT sums, std::int64_t sum_stride) {
  const D d;
  const std::int64_t n = lanes();
  V sum[kSpan][n_vectors];
  for (std::int64_t i = 0; i < kSpan; ++i) {
    for (int v = 0; v < n_vectors; ++v) {
      sum[i][v] = hn::Mul(hn::Set(d, shrink[i]), hn::LoadU(d, sums + i * sum_stride + v * n));
    }
  }
  for (std::int64_t t = 0; t < n_tokens; ++t, values += value_stride, weights += row_stride) {
    V value[n_vectors];
    for (int v = 0; v < n_vectors; ++v) value[v] = hn::LoadU(d, values + v * n);
    for (std::int64_t i = 0; i < kSpan; ++i) {
      const V weight = hn::Set(d, weights[i]);
      for (int v = 0; v < n_vectors; ++v) sum[i][v] = hn::MulAdd(weight, value[v], sum[i][v]);
    }
  }
  for (std::int64_t i = 0; i < kSpan; ++i) {
    for (int v = 0; v < n_vectors; ++v) hn::StoreU(sum[i][v], d, sums + i * sum_stride + v * n);
  }
}

/// 2^x for x <= 0: relative error below 2e-7, 1 at 0, 0 below -125, NaN for NaN.
HWY_INLINE V exp2(V x) {
  const D d;
  const hn::RebindToSigned<D> di;
  const V whole = hn::Round(x);
  const V f = hn::Sub(x, whole);  // -0.5 .. 0.5; 2^f = 1 + f * p(f)
  V p = hn::Set(d, 1.5353324e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.3398870e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.6184378e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5503324e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022648e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314718e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto exponent = hn::Add(hn::ConvertTo(di, whole), hn::Set(di, 127));
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  // A product, which keeps a NaN.
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -125.0f)), hn::Mul(p, power));
}

/// One item of a plan.
class Prefill {
 public:
  Prefill(const PagedAttentionParams& params, const PrefillPlan& plan, std::byte* memory,
          std::int64_t item, int worker)
      : p_(params), scratch_(params, plan, memory, worker), plan_(plan) {
    const auto take = [&item](std::int64_t n) {
      const std::int64_t index = item % n;
      item /= n;
      return index;
    };
    kv_head_ = take(p_.keys.shape.n_heads);
    const std::int64_t head_tile = take(plan.head_tiles());
    b_ = take(p_.batch);
    // Causal queries see more the later they are: the longest items first, so that workers end
    // together.
    const std::int64_t query_tile = plan.query_tiles(p_) - 1 - item;
    n_heads_ = std::min(plan.heads, plan.group - head_tile * plan.heads);
    first_head_ = kv_head_ * plan.group + head_tile * plan.heads;
    first_query_ = query_tile * plan.queries;
    n_queries_ = std::min(plan.queries, p_.n_queries - first_query_);
    n_rows_ = n_heads_ * n_queries_;
    padded_rows_ = PrefillPlan::padded(n_rows_);
    n_tokens_ = sequence_length(p_, b_);
    seen_by_all_ = {0, n_tokens_};
    seen_ = {n_tokens_, 0};
    for (std::int64_t i = 0; i < n_queries_; ++i) {
      const TokenRange seen = visible(p_, n_tokens_, first_query_ + i);
      if (seen.first >= seen.last) {
        seen_by_all_ = {0, 0};
        continue;
      }
      seen_ = {std::min(seen_.first, seen.first), std::max(seen_.last, seen.last)};
      seen_by_all_ = {std::max(seen_by_all_.first, seen.first),
                      std::min(seen_by_all_.last, seen.last)};
    }
  }

  void run() {
    load_queries();
    start_softmax();
    for (std::int64_t t = seen_.first; t < seen_.last;) {
      const std::int64_t end = std::min(t / kTokens * kTokens + kTokens, seen_.last);
      if (load_bias(t, end - t)) attend_tile(t, end - t);
      t = end;
    }
    store_output();
  }

 private:
  /// Where row r's query or output starts, in numbers.
  std::int64_t row_at(std::int64_t r, const std::int64_t (&strides)[3]) const {
    return b_ * strides[0] + (first_head_ + r / n_queries_) * strides[1] +
           (first_query_ + r % n_queries_) * strides[2];
  }

  /// Rows r .. r + 2 vectors (or what is left of them) lie together: [key head_dim, that many].
  void load_queries() {
    std::fill_n(scratch_.queries, p_.keys.shape.head_dim * padded_rows_, 0.0f);
    with_float_lanes(p_.query_format, [&](auto lanes) { load_queries(lanes); });
  }

  template <class Lanes>
  HWY_INLINE void load_queries(Lanes) {
    const D d;
    const std::int64_t dim = p_.keys.shape.head_dim;
    const std::int64_t whole = dim - dim % lanes();
    const float scale = p_.scale * kLog2E;
    for (std::int64_t r = 0; r < n_rows_; ++r) {
      const auto* query =
          static_cast<const typename Lanes::Number*>(p_.queries) + row_at(r, p_.q_strides);
      for (std::int64_t j = 0; j < whole; j += lanes()) {
        hn::StoreU(hn::Mul(Lanes::load(d, query + j), hn::Set(d, scale)), d, scratch_.row + j);
      }
      for (std::int64_t j = whole; j < dim; ++j) scratch_.row[j] = Lanes::widen(query[j]) * scale;
      const std::int64_t panel = r / (2 * lanes()) * 2 * lanes();
      const std::int64_t width = std::min(2 * lanes(), padded_rows_ - panel);
      float* to = scratch_.queries + panel * dim + (r - panel);
      for (std::int64_t j = 0; j < dim; ++j) to[j * width] = scratch_.row[j];
    }
  }

  /// A sink is a token before all others whose value is zero.
  void start_softmax() {
    for (std::int64_t r = 0; r < padded_rows_; ++r) {
      const bool sink = p_.sinks != nullptr && r < n_rows_;
      scratch_.largest[r] = sink ? p_.sinks[first_head_ + r / n_queries_] * kLog2E : kHidden;
      scratch_.total[r] = sink ? 1.0f : 0.0f;
    }
    std::fill_n(scratch_.sums, padded_rows_ * scratch_.value_stride, 0.0f);
  }

  /// What the mask adds to a tile's scores, in units of log2. False where it hides them all.
  bool load_bias(std::int64_t first, std::int64_t n) {
    switch (p_.mask_kind) {
      case MaskKind::kNone:
        return true;
      case MaskKind::kBoolean:
        return load_bias<std::uint8_t>(first, n, [](auto seen) { return seen ? 0.0f : kHidden; });
      case MaskKind::kFp32:
        return load_bias<float>(first, n, bias_in_log2);
      case MaskKind::kFp16:
        return load_bias<std::uint16_t>(
            first, n, [](auto bits) { return bias_in_log2(half_to_float(bits)); });
      case MaskKind::kBf16:
        return load_bias<std::uint16_t>(
            first, n, [](auto bits) { return bias_in_log2(bfloat16_to_float(bits)); });
    }
    return true;
  }

  /// A finite number stays finite: among tokens all at the lowest number none is hidden.
  static float bias_in_log2(float bias) {
    const float in_log2 = bias * kLog2E;
    return in_log2 == kHidden && bias != kHidden ? std::numeric_limits<float>::lowest() : in_log2;
  }

  template <class Number, class Read>
  bool load_bias(std::int64_t first, std::int64_t n, Read read) {
    const std::int64_t n_rows = p_.mask_strides[1] == 0 ? n_queries_ : n_rows_;
    bool any = false;
    for (std::int64_t r = 0; r < n_rows; ++r) {
      const Number* mask = static_cast<const Number*>(p_.mask) + b_ * p_.mask_strides[0] +
                           (first_head_ + r / n_queries_) * p_.mask_strides[1] +
                           (first_query_ + r % n_queries_) * p_.mask_strides[2] +
                           first * p_.mask_strides[3];
      float* to = scratch_.bias + r;
      for (std::int64_t t = 0; t < n; ++t) {
        const float bias = read(mask[t * p_.mask_strides[3]]);
        any = any || bias != kHidden;
        to[t * scratch_.row_stride] = bias;
      }
    }
    for (std::int64_t t = 0; any && t < n; ++t) {
      float* bias = scratch_.bias + t * scratch_.row_stride;
      for (std::int64_t r = n_rows; r < n_rows_; r += n_queries_) {
        std::copy_n(bias, n_queries_, bias + r);
      }
      std::fill(bias + n_rows_, bias + padded_rows_, 0.0f);
    }
    return any;
  }

  void attend_tile(std::int64_t first, std::int64_t n) {
    find_edges(first, n);
    decode(p_.keys, first, n, scratch_.keys, scratch_.key_stride);
    score();
    for (std::int64_t r = 0; r < padded_rows_; r += lanes()) {
      if (p_.mask_kind != MaskKind::kNone) add_bias(r);
      if (!all_seen_) hide(r);
      soften(r);
    }
    if (same_stream()) {
      add_values(first, n, scratch_.keys, scratch_.key_stride);
    } else {
      decode(p_.values, first, n, scratch_.values, scratch_.value_stride);
      add_values(first, n, scratch_.values, scratch_.value_stride);
    }
  }

  /// Which of the tile's tokens each row sees, masks aside.
  void find_edges(std::int64_t first, std::int64_t n) {
    all_seen_ = seen_by_all_.first <= first && first + n <= seen_by_all_.last;
    std::fill(std::begin(ends_), std::end(ends_), all_seen_ ? n : 0);
    if (all_seen_) return;
    for (std::int64_t r = 0; r < padded_rows_; ++r) {
      const TokenRange seen = visible(p_, n_tokens_, first_query_ + r % n_queries_);
      const auto in_tile = [&](std::int64_t t) {
        return std::clamp<std::int64_t>(t - first, 0, n);
      };
      from_[r] = static_cast<std::int32_t>(in_tile(seen.first));
      to_[r] = static_cast<std::int32_t>(in_tile(seen.last));
      std::int64_t& end = ends_[r / PrefillPlan::kRowStep];
      end = std::max(end, in_tile(seen.last));
    }
  }

  /// Tokens of the tile after which rows r .. r + n see none.
  std::int64_t end_of(std::int64_t r, std::int64_t n) const {
    std::int64_t end = 0;
    for (const std::int64_t last = r + n; r < last; r += PrefillPlan::kRowStep) {
      end = std::max(end, ends_[r / PrefillPlan::kRowStep]);
    }
    return end;
  }

  bool same_stream() const {
    return p_.keys.pages == p_.values.pages && p_.keys.shape == p_.values.shape;
  }

  /// Tokens first .. first + n of a stream as fp32 rows.
  void decode(const PagedStream& stream, std::int64_t first, std::int64_t n, float* rows,
              std::int64_t stride) const {
    const std::int64_t block_size = stream.shape.block_size;
    for (const std::int64_t last = first + n; first < last;) {
      const std::int64_t slot = first % block_size;
      const std::int64_t count = std::min(block_size - slot, last - first);
      const PageRef& page = page_of(p_, stream, b_, first / block_size);
      decode_rows({page.format, stream.shape}, page.data, kv_head_, slot, count, rows, stride);
      rows += count * stride;
      first += count;
    }
  }

  void score() {
    const std::int64_t width = 2 * lanes();
    std::int64_t r = 0;
    for (; r + width <= padded_rows_; r += width) score_panel<2>(end_of(r, width), r);
    if (r < padded_rows_) score_panel<1>(end_of(r, lanes()), r);
  }

  template <int n_vectors>
  void score_panel(std::int64_t n, std::int64_t r) {
    const std::int64_t dim = p_.keys.shape.head_dim;
    // The last block reads past the tile's tokens, still in the scratch; nobody reads its scores.
    for (std::int64_t t = 0; t < n; t += kSpan) {
      score_block<n_vectors>(scratch_.keys + t * scratch_.key_stride, scratch_.key_stride,
                             scratch_.queries + r * dim, dim,
                             scratch_.scores + t * scratch_.row_stride + r, scratch_.row_stride);
    }
  }

  // The next three work on one vector of rows from row r on.

  void add_bias(std::int64_t r) {
    const D d;
    const std::int64_t n = end_of(r, lanes());
    for (std::int64_t t = 0, at = r; t < n; ++t, at += scratch_.row_stride) {
      const V bias = hn::LoadU(d, scratch_.bias + at);
      const V score = hn::Add(hn::LoadU(d, scratch_.scores + at), bias);
      const V hidden = hn::Set(d, kHidden);
      hn::StoreU(hn::IfThenElse(hn::Eq(bias, hidden), hidden, score), d, scratch_.scores + at);
    }
  }

  /// Applies causality and the window.
  void hide(std::int64_t r) {
    const D d;
    const hn::RebindToSigned<D> di;
    const auto from = hn::LoadU(di, from_ + r);
    const auto to = hn::LoadU(di, to_ + r);
    const std::int64_t n = end_of(r, lanes());
    for (std::int64_t t = 0, at = r; t < n; ++t, at += scratch_.row_stride) {
      const auto token = hn::Set(di, static_cast<std::int32_t>(t));
      const auto hidden = hn::Or(hn::Lt(token, from), hn::Not(hn::Lt(token, to)));
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, hidden), hn::Set(d, kHidden),
                                hn::LoadU(d, scratch_.scores + at)),
                 d, scratch_.scores + at);
    }
  }

  /// Turns scores into weights against each row's largest score so far.
  void soften(std::int64_t r) {
    const D d;
    const std::int64_t n = end_of(r, lanes());
    float* scores = scratch_.scores + r;
    const V before = hn::LoadU(d, scratch_.largest + r);
    V largest = before;
    // A NaN gives way to the number here and comes back as its own weight.
    for (std::int64_t t = 0; t < n; ++t) {
      largest = hn::Max(hn::LoadU(d, scores + t * scratch_.row_stride), largest);
    }
    // Where all is hidden so far any finite number will do.
    const V shift = hn::IfThenZeroElse(hn::Eq(largest, hn::Set(d, kHidden)), largest);
    const V shrink = exp2(hn::Sub(before, shift));
    V total = hn::Mul(hn::LoadU(d, scratch_.total + r), shrink);
    for (std::int64_t t = 0; t < n; ++t) {
      float* score = scores + t * scratch_.row_stride;
      const V weight = exp2(hn::Sub(hn::LoadU(d, score), shift));
      hn::StoreU(weight, d, score);
      total = hn::Add(total, weight);
    }
    hn::StoreU(total, d, scratch_.total + r);
    hn::StoreU(largest, d, scratch_.largest + r);
    hn::StoreU(shrink, d, scratch_.shrink + r);
  }

  /// A weight of zero does not keep out a value that is infinite or no number: where some row does
  /// not see all of the tile, such values are left out and added for the rows that see them.
  void add_values(std::int64_t first, std::int64_t n, float* values, std::int64_t stride) {
    const std::int64_t dim = p_.values.shape.head_dim;
    std::int64_t left_out[kTokens];
    std::int64_t n_left_out = 0;
    for (std::int64_t t = 0; t < n && sees_part(); ++t) {
      if (leave_out_infinite(values + t * stride)) left_out[n_left_out++] = t;
    }
    std::int64_t j = 0;
    for (; j + lanes() < dim; j += 2 * lanes()) add_panel<2>(values + j, stride, j);
    if (j < dim) add_panel<1>(values + j, stride, j);
    for (std::int64_t i = 0; i < n_left_out; ++i) add_infinite(first, left_out[i]);
  }

  bool sees_part() const { return !all_seen_ || p_.mask_kind != MaskKind::kNone; }

  /// Whether there was any in the row.
  bool leave_out_infinite(float* row) const {
    const D d;
    const std::int64_t dim = p_.values.shape.head_dim;
    const std::int64_t whole = dim - dim % lanes();
    V zeros = hn::Zero(d);
    for (std::int64_t j = 0; j < whole; j += lanes()) {
      zeros = hn::MulAdd(hn::Zero(d), hn::LoadU(d, row + j), zeros);
    }
    bool finite = hn::AllTrue(d, hn::Eq(zeros, zeros));
    for (std::int64_t j = whole; j < dim; ++j) finite = finite && std::isfinite(row[j]);
    for (std::int64_t j = 0; !finite && j < dim; ++j) {
      if (!std::isfinite(row[j])) row[j] = 0;
    }
    return !finite;
  }

  /// Adds what was left out of token t of the tile that begins at `first`.
  void add_infinite(std::int64_t first, std::int64_t t) {
    decode(p_.values, first + t, 1, scratch_.row, scratch_.value_stride);
    for (std::int64_t r = 0; r < n_rows_; ++r) {
      if (t >= ends_[r / PrefillPlan::kRowStep]) continue;
      const float weight = scratch_.scores[t * scratch_.row_stride + r];
      if (weight == 0) continue;
      float* sum = scratch_.sums + r * scratch_.value_stride;
      for (std::int64_t j = 0; j < p_.values.shape.head_dim; ++j) {
        if (!std::isfinite(scratch_.row[j])) sum[j] += weight * scratch_.row[j];
      }
    }
  }

  template <int n_vectors>
  void add_panel(const float* values, std::int64_t stride, std::int64_t j) {
    for (std::int64_t r = 0; r < padded_rows_; r += kSpan) {
      value_block<n_vectors>(scratch_.scores + r, scratch_.row_stride, values, stride,
                             end_of(r, kSpan), scratch_.shrink + r,
                             scratch_.sums + r * scratch_.value_stride + j, scratch_.value_stride);
    }
  }

  void store_output() {
    with_float_lanes(p_.query_format, [&](auto lanes) { store_output(lanes); });
  }

  template <class Lanes>
  HWY_INLINE void store_output(Lanes) {
    const D d;
    const std::int64_t dim = p_.values.shape.head_dim;
    const std::int64_t whole = dim - dim % lanes();
    for (std::int64_t r = 0; r < n_rows_; ++r) {
      const float* sum = scratch_.sums + r * scratch_.value_stride;
      const float inverse = scratch_.total[r] == 0 ? 0.0f : 1.0f / scratch_.total[r];
      auto* output = static_cast<typename Lanes::Number*>(p_.output) + row_at(r, p_.out_strides);
      for (std::int64_t j = 0; j < whole; j += lanes()) {
        Lanes::store(d, hn::Mul(hn::LoadU(d, sum + j), hn::Set(d, inverse)), output + j);
      }
      for (std::int64_t j = whole; j < dim; ++j) output[j] = Lanes::narrow(sum[j] * inverse);
    }
  }

  const PagedAttentionParams& p_;
  const PrefillScratch scratch_;
  const PrefillPlan& plan_;
  std::int64_t kv_head_, b_, first_head_, n_heads_, first_query_, n_queries_;
  std::int64_t n_rows_, padded_rows_, n_tokens_;
  TokenRange seen_;         // by any query
  TokenRange seen_by_all_;  // by each of them
  // Of the tile at hand: whether all its tokens are seen by all rows; else row r sees from_[r] ..
  // to_[r], and the kRowStep rows from i * kRowStep on see nothing from ends_[i] on.
  bool all_seen_ = false;
  std::int32_t from_[PrefillPlan::kRows];
  std::int32_t to_[PrefillPlan::kRows];
  std::int64_t ends_[PrefillPlan::kRows / PrefillPlan::kRowStep];
};

void PagedPrefill(const PagedAttentionParams& params, std::byte* scratch, WorkerPool* workers) {
  const PrefillPlan plan(params, workers == nullptr ? 1 : workers->n_threads());
  const std::int64_t n_items = plan.n_items(params);
  const auto attend = [&](std::int64_t item, int worker) noexcept {
    Prefill(params, plan, scratch, item, worker).run();
  };
  std::int64_t tokens = 0;
  for (std::int64_t b = 0; b < params.batch; ++b) tokens += sequence_length(params, b);
  const bool small = tokens * params.n_queries * params.n_q_heads *
                         (params.keys.shape.head_dim + params.values.shape.head_dim) <
                     kSmallWork;
  if (workers == nullptr || small) {
    for (std::int64_t item = 0; item < n_items; ++item) attend(item, 0);
  } else {
    workers->run(n_items, attend);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "paged_prefill_simd.h"
#include "simd_dispatch.h"

namespace kvpool::kernels {

HWY_EXPORT(PagedPrefill);

namespace {

std::size_t prefill_scratch_bytes(const PagedAttentionParams& params, std::int64_t n_workers) {
  const PrefillPlan plan(params, n_workers);
  return static_cast<std::size_t>(n_workers) * PrefillScratch(params, plan).floats * sizeof(float);
}

}  // namespace

std::vector<PagedAttentionKernel> paged_prefill_simd_kernels() {
  struct Entry {
    std::string_view target;
    decltype(PagedAttentionKernel::Variant::run) run;
  };
  std::vector<PagedAttentionKernel> kernels;
  for (const Entry& entry : supported_kernels<Entry>(HWY_DISPATCH_TABLE(PagedPrefill))) {
    const PagedAttentionKernel::Variant variant = {prefill_scratch_bytes, entry.run};
    kernels.push_back({entry.target, variant, variant});
  }
  return kernels;
}

}  // namespace kvpool::kernels
#endif
