#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvpool/formats/format.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/page_ref.h"

namespace kvpool::kernels {

class WorkerPool;

/// The pages of keys or of values, those of all sequences together.
struct PagedStream {
  const PageRef* pages = nullptr;
  std::int64_t n_pages = 0;
  formats::PageShape shape;
};

/// From so many rows (queries of all q heads of a kv head) on `prefill` is the faster variant.
inline constexpr std::int64_t kPrefillRows = 32;

enum class MaskKind : std::uint8_t { kNone, kBoolean, kFp32, kFp16, kBf16 };

/// Attention of a batch of sequences whose keys and values lie in pages, each page in a format of
/// its own. The batch is ragged: sequence b has the pages indptr[b] .. indptr[b + 1] (FlashInfer's
/// names, arXiv:2501.01005), all full but its last one, which holds last_page_len[b] tokens.
struct PagedAttentionParams {
  /// [batch, n_q_heads, n_queries, key head_dim], fp32, fp16 or bf16. Strides of the first three in
  /// numbers; the last is dense.
  const void* queries = nullptr;
  formats::Format query_format = formats::Format::kFp32;
  std::int64_t q_strides[3] = {};

  /// Same n_heads and block_size, which may have other formats and another head_dim. Both may be
  /// the same pages. n_heads divides n_q_heads: q head h reads head h / (n_q_heads / n_heads).
  PagedStream keys;
  PagedStream values;

  std::int64_t batch = 0;
  std::int64_t n_q_heads = 0;
  std::int64_t n_queries = 0;

  /// [batch + 1]
  const std::int32_t* indptr = nullptr;
  /// [indptr[batch]] page numbers, the same in keys and in values; nullptr: 0, 1, 2, ...
  const std::int32_t* indices = nullptr;
  /// [batch], 1..block_size
  const std::int32_t* last_page_len = nullptr;

  float scale = 1;
  /// The n_queries queries are a sequence's last positions: query i is at p = n_tokens - n_queries
  /// + i. Causal queries see positions <= p; a window > 0 hides positions <= p - window.
  bool causal = false;
  std::int64_t window = 0;
  /// [n_q_heads] or nullptr: one more logit a head, whose value is zero.
  const float* sinks = nullptr;
  /// [batch, n_q_heads, n_queries, n_tokens] with strides in numbers, 0 to broadcast. A boolean is
  /// a byte, 0 hides; floats are added to the scaled score.
  const void* mask = nullptr;
  MaskKind mask_kind = MaskKind::kNone;
  std::int64_t mask_strides[4] = {};

  /// [batch, n_q_heads, n_queries, value head_dim] in query_format, strides as the queries'. A
  /// query that sees nothing gets zeros.
  void* output = nullptr;
  std::int64_t out_strides[3] = {};
};

/// Tokens of sequence b.
inline std::int64_t sequence_length(const PagedAttentionParams& p, std::int64_t b) noexcept {
  const std::int64_t n_pages = p.indptr[b + 1] - p.indptr[b];
  return n_pages == 0 ? 0 : (n_pages - 1) * p.keys.shape.block_size + p.last_page_len[b];
}

/// The page of sequence b that holds its tokens from page * block_size on.
inline const PageRef& page_of(const PagedAttentionParams& p, const PagedStream& stream,
                              std::int64_t b, std::int64_t page) noexcept {
  const std::int64_t at = p.indptr[b] + page;
  return stream.pages[p.indices == nullptr ? at : p.indices[at]];
}

/// Throws InvalidArgument that names the argument: shapes that don't fit, page numbers past the
/// pages there are, a last_page_len outside 1..block_size, a sequence without pages. The kernels
/// check nothing.
void validate(const PagedAttentionParams& params);

/// Bytes that paged_attention() wants as scratch, aligned to 64, with this many workers.
std::size_t paged_attention_scratch_bytes(const PagedAttentionParams& params,
                                          std::int64_t n_workers) noexcept;

/// Runs the fastest kernel of this machine. Products and sums are fp32; the softmax is taken over
/// splits of fixed length against each one's largest score, and splits are combined in order: the
/// output has the same bits for any number of workers, for a sequence alone and in a batch, and
/// wherever its pages lie. Slots past a sequence's tokens may hold anything, and so may tokens that
/// a query does not see: no NaN and no infinity of theirs reaches it. Nothing is allocated.
/// `workers` may be null.
void paged_attention(const PagedAttentionParams& params, std::byte* scratch,
                     WorkerPool* workers) noexcept;

/// The meaning of paged_attention(), in plain C++: the oracle of the tests and the fallback. Needs
/// paged_attention_scratch_bytes(params, 1) of scratch.
void paged_attention_scalar(const PagedAttentionParams& params, std::byte* scratch) noexcept;

/// One implementation of paged_attention(), in two shapes that both take any number of queries.
struct PagedAttentionKernel {
  struct Variant {
    std::size_t (*scratch_bytes)(const PagedAttentionParams&, std::int64_t n_workers) = nullptr;
    void (*run)(const PagedAttentionParams&, std::byte* scratch, WorkerPool* workers) = nullptr;
  };

  /// The instructions it uses: "AVX3_DL", "NEON", ... or "scalar".
  std::string_view target;
  /// Reads each page once for few queries.
  Variant decode;
  /// Multiplies tiles of queries with tiles of tokens.
  Variant prefill;

  const Variant& variant(const PagedAttentionParams& params) const noexcept {
    const std::int64_t rows = params.n_queries * (params.n_q_heads / params.keys.shape.n_heads);
    return rows >= kPrefillRows ? prefill : decode;
  }
  std::size_t scratch_bytes(const PagedAttentionParams& params,
                            std::int64_t n_workers) const noexcept {
    return variant(params).scratch_bytes(params, n_workers);
  }
  void run(const PagedAttentionParams& params, std::byte* scratch,
           WorkerPool* workers) const noexcept {
    variant(params).run(params, scratch, workers);
  }
};

/// Those that this machine can run, fastest first; the last one is scalar.
std::span<const PagedAttentionKernel> paged_attention_kernels();

}  // namespace kvpool::kernels
