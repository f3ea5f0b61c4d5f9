// Vector version of attention_scalar. Highway compiles this file once a target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention_simd.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>
//
#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "float_lanes-inl.h"
#include "kvpool/kernels/attention.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// Tokens whose scores are held at once, and queries that share a pass over them. Fixed, so that
// sums are formed in the same order whatever the batch.
constexpr std::int64_t kTokens = 64;
constexpr std::int64_t kQueries = 16;

/// scores[t] = scale * <query, key row t> for n rows of `dim` numbers.
template <class Rows>
HWY_INLINE void score_rows(const float* HWY_RESTRICT query,
                           const typename Rows::Number* HWY_RESTRICT keys, std::int64_t n,
                           std::int64_t dim, float scale, float* HWY_RESTRICT scores) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t whole = dim - dim % lanes;
  const auto finish = [&](V sum, const typename Rows::Number* key) {
    float score = hn::GetLane(hn::SumOfLanes(d, sum));
    for (std::int64_t j = whole; j < dim; ++j) score += query[j] * Rows::widen(key[j]);
    return score * scale;
  };
  std::int64_t t = 0;
  for (; t + 4 <= n; t += 4) {  // four rows at a time: four independent chains, one query load
    const auto* k0 = keys + t * dim;
    const auto* k1 = k0 + dim;
    const auto* k2 = k1 + dim;
    const auto* k3 = k2 + dim;
    V s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    for (std::int64_t j = 0; j < whole; j += lanes) {
      const V q = hn::LoadU(d, query + j);
      s0 = hn::MulAdd(q, Rows::load(d, k0 + j), s0);
      s1 = hn::MulAdd(q, Rows::load(d, k1 + j), s1);
      s2 = hn::MulAdd(q, Rows::load(d, k2 + j), s2);
      s3 = hn::MulAdd(q, Rows::load(d, k3 + j), s3);
    }
    scores[t] = finish(s0, k0);
    scores[t + 1] = finish(s1, k1);
    scores[t + 2] = finish(s2, k2);
    scores[t + 3] = finish(s3, k3);
  }
  for (; t < n; ++t) {
    const auto* key = keys + t * dim;
    V sum = hn::Zero(d);
    for (std::int64_t j = 0; j < whole; j += lanes) {
      sum = hn::MulAdd(hn::LoadU(d, query + j), Rows::load(d, key + j), sum);
    }
    scores[t] = finish(sum, key);
  }
}

/// Replaces scores by exp(score - largest) and returns their sum.
HWY_INLINE float exponentiate(float* HWY_RESTRICT scores, std::int64_t n, float largest) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V shift = hn::Set(d, largest);
  V sum = hn::Zero(d);
  // kTokens is a multiple of every vector length, so the last vector stays inside the array; what
  // it computes past n is cut off the sum.
  for (std::int64_t t = 0; t < n; t += lanes) {
    V weight = hn::Exp(d, hn::Sub(hn::LoadU(d, scores + t), shift));
    weight = hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(n - t)), weight);
    hn::StoreU(weight, d, scores + t);
    sum = hn::Add(sum, weight);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// output = output * shrink + sum_t weights[t] * value row t, in register tiles of columns.
template <class Rows>
HWY_INLINE void add_rows(const float* HWY_RESTRICT weights,
                         const typename Rows::Number* HWY_RESTRICT values, std::int64_t n,
                         std::int64_t dim, float shrink, float* HWY_RESTRICT output) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V factor = hn::Set(d, shrink);
  std::int64_t j = 0;
  for (; j + 4 * lanes <= dim; j += 4 * lanes) {
    float* out = output + j;
    V o0 = hn::Mul(factor, hn::LoadU(d, out));
    V o1 = hn::Mul(factor, hn::LoadU(d, out + lanes));
    V o2 = hn::Mul(factor, hn::LoadU(d, out + 2 * lanes));
    V o3 = hn::Mul(factor, hn::LoadU(d, out + 3 * lanes));
    const auto* row = values + j;
    for (std::int64_t t = 0; t < n; ++t, row += dim) {
      const V weight = hn::Set(d, weights[t]);
      o0 = hn::MulAdd(weight, Rows::load(d, row), o0);
      o1 = hn::MulAdd(weight, Rows::load(d, row + lanes), o1);
      o2 = hn::MulAdd(weight, Rows::load(d, row + 2 * lanes), o2);
      o3 = hn::MulAdd(weight, Rows::load(d, row + 3 * lanes), o3);
    }
    hn::StoreU(o0, d, out);
    hn::StoreU(o1, d, out + lanes);
    hn::StoreU(o2, d, out + 2 * lanes);
    hn::StoreU(o3, d, out + 3 * lanes);
  }
  for (; j + lanes <= dim; j += lanes) {
    V o = hn::Mul(factor, hn::LoadU(d, output + j));
    const auto* row = values + j;
    for (std::int64_t t = 0; t < n; ++t, row += dim) {
      o = hn::MulAdd(hn::Set(d, weights[t]), Rows::load(d, row), o);
    }
    hn::StoreU(o, d, output + j);
  }
  for (; j < dim; ++j) {
    float o = shrink * output[j];
    for (std::int64_t t = 0; t < n; ++t) o += weights[t] * Rows::widen(values[t * dim + j]);
    output[j] = o;
  }
}

template <class Rows>
void attend(const AttentionParams& p) noexcept {
  using Number = typename Rows::Number;
  const auto* keys = reinterpret_cast<const Number*>(p.keys);
  const auto* values = reinterpret_cast<const Number*>(p.values);
  alignas(64) float scores[kTokens] = {};
  for (std::int64_t first = 0; first < p.n_queries; first += kQueries) {
    const std::int64_t n_queries = std::min(kQueries, p.n_queries - first);
    float largest[kQueries];
    float total[kQueries] = {};
    std::fill_n(largest, kQueries, -std::numeric_limits<float>::infinity());
    std::fill_n(p.output + first * p.value_dim, n_queries * p.value_dim, 0.0f);
    for (std::int64_t t = 0; t < p.n_tokens; t += kTokens) {
      const std::int64_t n = std::min(kTokens, p.n_tokens - t);
      for (std::int64_t i = 0; i < n_queries; ++i) {
        score_rows<Rows>(p.queries + (first + i) * p.head_dim, keys + t * p.head_dim, n, p.head_dim,
                         p.scale, scores);
        const float top = std::max(largest[i], *std::max_element(scores, scores + n));
        const float shrink = std::exp(largest[i] - top);
        total[i] = total[i] * shrink + exponentiate(scores, n, top);
        largest[i] = top;
        add_rows<Rows>(scores, values + t * p.value_dim, n, p.value_dim, shrink,
                       p.output + (first + i) * p.value_dim);
      }
    }
    for (std::int64_t i = 0; i < n_queries; ++i) {
      float* output = p.output + (first + i) * p.value_dim;
      for (std::int64_t j = 0; j < p.value_dim; ++j) output[j] /= total[i];
    }
  }
}

void Attention(const AttentionParams& params) {
  with_float_lanes(params.format, [&](auto kind) HWY_ATTR { attend<decltype(kind)>(params); });
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "attention_simd.h"
#include "simd_dispatch.h"

namespace kvpool::kernels {

HWY_EXPORT(Attention);

std::vector<AttentionKernel> attention_simd_kernels() {
  return supported_kernels<AttentionKernel>(HWY_DISPATCH_TABLE(Attention));
}

}  // namespace kvpool::kernels
#endif
