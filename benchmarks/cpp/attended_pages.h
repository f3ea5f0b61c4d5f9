#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/attention.h"
#include "kvpool/kernels/paged_attention.h"

namespace kvpool::benchmarks {

// The model whose attention is measured.
inline constexpr std::int64_t kQHeads = 32;
inline constexpr std::int64_t kKvHeads = 8;
inline constexpr std::int64_t kDim = 128;

inline std::vector<float> normal(std::int64_t n) {
  std::mt19937 random(7);
  std::normal_distribution<float> distribution;
  std::vector<float> numbers(static_cast<std::size_t>(n));
  for (float& number : numbers) number = distribution(random);
  return numbers;
}

/// The same random page `n` times, one behind the other from `memory` on.
inline std::vector<kernels::PageRef> fill_pages(const formats::PageLayout& layout,
                                                std::byte* memory, std::int64_t n) {
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
  const std::int64_t head = layout.shape.block_size * layout.shape.head_dim;
  const std::vector<float> rows = normal(layout.shape.n_heads * head);
  for (std::int64_t h = 0; h < layout.shape.n_heads; ++h) {
    formats::encode_tokens(layout, page.data(), h, 0, layout.shape.block_size,
                           rows.data() + h * head, layout.shape.head_dim);
  }
  std::vector<kernels::PageRef> pages;
  for (std::int64_t i = 0; i < n; ++i) {
    std::byte* at = memory + i * layout.page_bytes();
    std::memcpy(at, page.data(), page.size());
    pages.push_back({at, layout.format});
  }
  return pages;
}

/// One sequence's `n_queries` queries at its end, causal, to which its pages are to be added.
/// `queries` and `output` are [kQHeads, n_queries, kDim].
template <class Number>
kernels::PagedAttentionParams causal_attention(formats::Format format,
                                               const std::vector<Number>& queries,
                                               std::vector<Number>& output,
                                               std::int64_t n_queries) {
  kernels::PagedAttentionParams p;
  p.queries = queries.data();
  p.query_format = format;
  p.batch = 1;
  p.n_q_heads = kQHeads;
  p.n_queries = n_queries;
  p.scale = kernels::attention_scale(kDim);
  p.causal = true;
  p.output = output.data();
  for (auto* strides : {&p.q_strides, &p.out_strides}) {
    (*strides)[0] = kQHeads * n_queries * kDim;
    (*strides)[1] = n_queries * kDim;
    (*strides)[2] = kDim;
  }
  return p;
}

}  // namespace kvpool::benchmarks
