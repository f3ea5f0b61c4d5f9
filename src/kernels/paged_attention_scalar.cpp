#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvpool/base/half.h"
#include "kvpool/kernels/paged_attention.h"
#include "paged_attention_common.h"

namespace kvpool::kernels {

void paged_attention_scalar(const PagedAttentionParams& p, std::byte* scratch) noexcept {
  const std::int64_t key_dim = p.keys.shape.head_dim;
  const std::int64_t value_dim = p.values.shape.head_dim;
  const std::int64_t block_size = p.keys.shape.block_size;
  const std::int64_t group = p.n_q_heads / p.keys.shape.n_heads;
  auto* query = reinterpret_cast<float*>(scratch);
  float* row = query + key_dim;
  float* sum = row + std::max(key_dim, value_dim);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t n_tokens = sequence_length(p, b);
    for (std::int64_t h = 0; h < p.n_q_heads; ++h) {
      for (std::int64_t i = 0; i < p.n_queries; ++i) {
        read_query(p, b, h, i, query);
        std::fill_n(sum, value_dim, 0.0f);
        float largest = p.sinks == nullptr ? kHidden : p.sinks[h];
        float total = p.sinks == nullptr ? 0.0f : 1.0f;
        const TokenRange seen = visible(p, n_tokens, i);
        for (std::int64_t t = seen.first; t < seen.last; ++t) {
          const PageRef& key = page_of(p, p.keys, b, t / block_size);
          formats::decode_tokens({key.format, p.keys.shape}, key.data, h / group, t % block_size, 1,
                                 row, key_dim);
          float score = 0;
          for (std::int64_t j = 0; j < key_dim; ++j) score += query[j] * row[j];
          score = masked(p, b, h, i, t, score * p.scale);
          if (score == kHidden) continue;
          if (score > largest) {  // what is summed so far was weighted against a smaller score
            const float shrink = std::exp(largest - score);
            total *= shrink;
            for (std::int64_t j = 0; j < value_dim; ++j) sum[j] *= shrink;
            largest = score;
          }
          const float weight = std::exp(score - largest);
          total += weight;
          const PageRef& value = page_of(p, p.values, b, t / block_size);
          formats::decode_tokens({value.format, p.values.shape}, value.data, h / group,
                                 t % block_size, 1, row, value_dim);
          for (std::int64_t j = 0; j < value_dim; ++j) sum[j] += weight * row[j];
        }
        const float inverse = total > 0 ? 1 / total : 0;
        for (std::int64_t j = 0; j < value_dim; ++j) sum[j] *= inverse;
        write_output(p, b, h, i, sum);
      }
    }
  }
}

}  // namespace kvpool::kernels
