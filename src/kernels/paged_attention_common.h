#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "kvpool/base/half.h"
#include "kvpool/kernels/paged_attention.h"

// What every implementation of paged attention has in common: which tokens a query sees, the mask,
// queries in and outputs out. Small enough to be compiled for no instruction set in particular.

namespace kvpool::kernels {

/// The score of a token that a query does not see.
inline constexpr float kHidden = -std::numeric_limits<float>::infinity();

/// Tokens first .. last of a sequence.
struct TokenRange {
  std::int64_t first;
  std::int64_t last;
};

/// What query i of a sequence may see by causality and window, masks aside.
inline TokenRange visible(const PagedAttentionParams& p, std::int64_t n_tokens,
                          std::int64_t i) noexcept {
  const std::int64_t position = n_tokens - p.n_queries + i;
  const std::int64_t last =
      p.causal ? std::clamp<std::int64_t>(position + 1, 0, n_tokens) : n_tokens;
  const std::int64_t first =
      p.window > 0 ? std::clamp<std::int64_t>(position - p.window + 1, 0, last) : 0;
  return {first, last};
}

/// Number i of an array of floats in `format`.
inline float read_float(formats::Format format, const void* data, std::int64_t i) noexcept {
  if (format == formats::Format::kFp32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return format == formats::Format::kFp16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

inline void write_float(formats::Format format, void* data, std::int64_t i, float value) noexcept {
  if (format == formats::Format::kFp32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] =
        format == formats::Format::kFp16 ? float_to_half(value) : float_to_bfloat16(value);
  }
}

/// A scaled score with the mask's number applied, which hides a score that is no number, too.
inline float biased(float score, float bias) noexcept {
  return bias == kHidden ? kHidden : score + bias;
}

/// A scaled score with the mask applied.
inline float masked(const PagedAttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i,
                    std::int64_t t, float score) noexcept {
  if (p.mask_kind == MaskKind::kNone) return score;
  const std::int64_t at =
      b * p.mask_strides[0] + h * p.mask_strides[1] + i * p.mask_strides[2] + t * p.mask_strides[3];
  switch (p.mask_kind) {
    case MaskKind::kBoolean:
      return static_cast<const std::uint8_t*>(p.mask)[at] != 0 ? score : kHidden;
    case MaskKind::kFp16:
      return biased(score, read_float(formats::Format::kFp16, p.mask, at));
    case MaskKind::kBf16:
      return biased(score, read_float(formats::Format::kBf16, p.mask, at));
    default:
      return biased(score, read_float(formats::Format::kFp32, p.mask, at));
  }
}

/// The key head_dim numbers of a query, not yet scaled.
inline void read_query(const PagedAttentionParams& p, std::int64_t b, std::int64_t h,
                       std::int64_t i, float* numbers) noexcept {
  const std::int64_t at = b * p.q_strides[0] + h * p.q_strides[1] + i * p.q_strides[2];
  for (std::int64_t j = 0; j < p.keys.shape.head_dim; ++j) {
    numbers[j] = read_float(p.query_format, p.queries, at + j);
  }
}

inline void write_output(const PagedAttentionParams& p, std::int64_t b, std::int64_t h,
                         std::int64_t i, const float* numbers) noexcept {
  const std::int64_t at = b * p.out_strides[0] + h * p.out_strides[1] + i * p.out_strides[2];
  for (std::int64_t j = 0; j < p.values.shape.head_dim; ++j) {
    write_float(p.query_format, p.output, at + j, numbers[j]);
  }
}

}  // namespace kvpool::kernels
