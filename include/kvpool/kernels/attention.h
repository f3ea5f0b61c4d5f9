#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvpool/formats/format.h"

namespace kvpool::kernels {

/// Exact attention of some queries over rows of keys and values, without a mask: for each query q,
///
///   output = sum_t w_t v_t,   w = softmax_t(scale * <q, k_t>).
struct AttentionParams {
  /// [n_queries, head_dim], fp32.
  const float* queries = nullptr;
  /// [n_tokens, head_dim] in `format`, rows without gaps.
  const std::byte* keys = nullptr;
  /// [n_tokens, value_dim] in `format`, rows without gaps.
  const std::byte* values = nullptr;
  /// fp32, fp16 or bf16.
  formats::Format format = formats::Format::kFp32;
  std::int64_t n_queries = 0;
  /// >= 1: nothing is defined as the mean of no values.
  std::int64_t n_tokens = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  float scale = 1;
  /// [n_queries, value_dim], fp32; overlaps nothing above.
  float* output = nullptr;
};

/// 1 / sqrt(head_dim), the usual scale.
inline float attention_scale(std::int64_t head_dim) noexcept {
  return 1.0f / std::sqrt(static_cast<float>(head_dim));
}

/// Runs the fastest kernel of this machine. Scores and sums are fp32, the softmax is taken against
/// the largest score so far, so no weight overflows; finite inputs whose scores stay below fp32's
/// range give finite outputs. One thread; equal inputs give equal bits on one machine.
void attention(const AttentionParams& params) noexcept;

/// The meaning of attention(), in plain C++: the oracle of the tests and the fallback.
void attention_scalar(const AttentionParams& params) noexcept;

/// One implementation of attention().
struct AttentionKernel {
  /// The instructions it uses: "AVX3", "NEON", ... or "scalar".
  std::string_view target;
  void (*run)(const AttentionParams&) = nullptr;
};

/// Those that this machine can run, fastest first; the last one is attention_scalar.
std::span<const AttentionKernel> attention_kernels();

}  // namespace kvpool::kernels
