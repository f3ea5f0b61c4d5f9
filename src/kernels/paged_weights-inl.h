// From scores to weights, with vectors. Included once a target.
#if defined(KVPOOL_PAGED_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPOOL_PAGED_WEIGHTS_INL_H_
#undef KVPOOL_PAGED_WEIGHTS_INL_H_
#else
#define KVPOOL_PAGED_WEIGHTS_INL_H_
#endif

#include <hwy/highway.h>
//
#include <hwy/contrib/math/math-inl.h>

#include <cstdint>

#include "float_lanes-inl.h"
#include "paged_attention_common.h"
#include "paged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE  // as in paged_rows-inl.h
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Applies the mask of a query to its scores of tokens first .. first + count, by whole vectors and
/// where the mask is dense; returns how many are done.
HWY_INLINE std::int64_t apply_mask(const PagedAttentionParams& p, std::int64_t b, std::int64_t h,
                                   std::int64_t i, std::int64_t first, std::int64_t count,
                                   float* HWY_RESTRICT scores) {
  if (p.mask_strides[3] != 1) return 0;
  const std::int64_t at =
      b * p.mask_strides[0] + h * p.mask_strides[1] + i * p.mask_strides[2] + first;
  const std::int64_t n = count > 0 ? count / kLanes * kLanes : 0;
  if (p.mask_kind == MaskKind::kBoolean) {
    const hn::RebindToUnsigned<D> words;
    const hn::Rebind<std::uint8_t, D> bytes;
    const auto* mask = static_cast<const std::uint8_t*>(p.mask) + at;
    for (std::int64_t t = 0; t < n; t += kLanes) {
      const auto seen = hn::PromoteTo(words, hn::LoadU(bytes, mask + t));
      const auto hidden = hn::RebindMask(D(), hn::Eq(seen, hn::Zero(words)));
      const V score = hn::LoadU(D(), scores + t);
      hn::StoreU(hn::IfThenElse(hidden, hn::Set(D(), kHidden), score), D(), scores + t);
    }
    return n;
  }
  const formats::Format format = p.mask_kind == MaskKind::kFp16   ? formats::Format::kFp16
                                 : p.mask_kind == MaskKind::kBf16 ? formats::Format::kBf16
                                                                  : formats::Format::kFp32;
  with_float_lanes(format, [&](auto kind) HWY_ATTR {
    using Lanes = decltype(kind);
    const auto* mask = static_cast<const typename Lanes::Number*>(p.mask) + at;
    for (std::int64_t t = 0; t < n; t += kLanes) {
      const V bias = Lanes::load(D(), mask + t);
      const V score = hn::Add(hn::LoadU(D(), scores + t), bias);
      const V hidden = hn::Set(D(), kHidden);
      hn::StoreU(hn::IfThenElse(hn::Eq(bias, hidden), hidden, score), D(), scores + t);
    }
  });
  return n;
}

/// Replaces `width` scores, whole vectors of them, by exp(score - largest) and returns their sum;
/// all are zero if all were hidden.
HWY_INLINE float exponentiate(float* HWY_RESTRICT scores, std::int64_t width, float& largest) {
  V most = hn::Set(D(), kHidden);
  for (std::int64_t t = 0; t < width; t += kLanes) {
    most = hn::Max(most, hn::LoadU(D(), scores + t));
  }
  largest = hn::GetLane(hn::MaxOfLanes(D(), most));
  V sum = hn::Zero(D());
  const V shift = hn::Set(D(), largest == kHidden ? 0.0f : largest);
  for (std::int64_t t = 0; t < width; t += kLanes) {
    const V below = hn::Sub(hn::LoadU(D(), scores + t), shift);
    // Exp does not keep a NaN.
    const V weight = hn::IfThenElse(hn::Eq(below, below), hn::Exp(D(), below), below);
    hn::StoreU(weight, D(), scores + t);
    sum = hn::Add(sum, weight);
  }
  return hn::GetLane(hn::SumOfLanes(D(), sum));
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
#endif
HWY_AFTER_NAMESPACE();

#endif
