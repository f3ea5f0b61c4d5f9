#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvpool/base/half.h"
#include "kvpool/kernels/attention.h"

namespace kvpool::kernels {
namespace {

using formats::Format;

template <Format format>
float number_at(const std::byte* row, std::int64_t i) noexcept {
  if constexpr (format == Format::kFp32) {
    float value;
    std::memcpy(&value, row + i * 4, 4);
    return value;
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, row + i * 2, 2);
    return format == Format::kFp16 ? half_to_float(bits) : bfloat16_to_float(bits);
  }
}

template <Format format>
void attend(const AttentionParams& p) noexcept {
  const std::int64_t number_bytes = formats::traits(format).bits / 8;
  for (std::int64_t i = 0; i < p.n_queries; ++i) {
    const float* query = p.queries + i * p.head_dim;
    float* output = p.output + i * p.value_dim;
    std::fill_n(output, p.value_dim, 0.0f);
    float largest = -std::numeric_limits<float>::infinity();
    float total = 0;
    for (std::int64_t t = 0; t < p.n_tokens; ++t) {
      const std::byte* key = p.keys + t * p.head_dim * number_bytes;
      float score = 0;
      for (std::int64_t j = 0; j < p.head_dim; ++j) score += query[j] * number_at<format>(key, j);
      score *= p.scale;
      if (score > largest) {  // what is summed so far was weighted against a smaller score
        const float shrink = std::exp(largest - score);
        total *= shrink;
        for (std::int64_t j = 0; j < p.value_dim; ++j) output[j] *= shrink;
        largest = score;
      }
      const float weight = std::exp(score - largest);
      total += weight;
      const std::byte* value = p.values + t * p.value_dim * number_bytes;
      for (std::int64_t j = 0; j < p.value_dim; ++j) {
        output[j] += weight * number_at<format>(value, j);
      }
    }
    for (std::int64_t j = 0; j < p.value_dim; ++j) output[j] /= total;
  }
}

}  // namespace

void attention_scalar(const AttentionParams& params) noexcept {
  switch (params.format) {
    case Format::kFp16:
      return attend<Format::kFp16>(params);
    case Format::kBf16:
      return attend<Format::kBf16>(params);
    default:
      return attend<Format::kFp32>(params);
  }
}

}  // namespace kvpool::kernels
