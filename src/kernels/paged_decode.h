#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/kernels/paged_attention.h"

// Decode: attention of few queries over many pages. Tokens are cut into splits. All query rows of a
// kv head attend to the tokens of a split, which gives a partial result: for each row the largest
// score, the sum of weights relative to it, and the weighted sum of values. Then the partial
// results of each (sequence, kv head) are added in order. An item of work is one split of a
// sequence and some of its kv heads, whose bytes lie side by side in the split's pages.

namespace kvpool::kernels {

/// Floats are kept in rows of a multiple of this many numbers, which every vector length divides.
inline constexpr std::int64_t kPagedPadding = 16;

constexpr std::int64_t paged_padded(std::int64_t n) noexcept {
  return (n + kPagedPadding - 1) / kPagedPadding * kPagedPadding;
}

/// Tokens of a split, as far as blocks allow. Fixed, so that sums never depend on the batch or on
/// the threads.
inline constexpr std::int64_t kSplitTokens = 256;

/// Query rows of a (sequence, kv head) that are multiplied at once.
inline constexpr std::int64_t kDecodeRows = 4;

/// How the work is cut and where scratch lies; all counts are of numbers (4 bytes).
struct DecodePlan {
  std::int64_t group;  // query heads of a kv head
  std::int64_t rows;   // query rows of a kv head: query i of its head g is row g * n_queries + i
  std::int64_t n_heads;
  std::int64_t block_size;
  std::int64_t lanes;  // of pages of codes
  std::int64_t split_blocks;
  std::int64_t split;        // tokens
  std::int64_t split_width;  // padded
  std::int64_t key_width;    // padded head_dim
  std::int64_t value_width;
  std::int64_t key_groups;
  std::int64_t value_groups;

  // Query rows of a (sequence, kv head), prepared once.
  std::int64_t numbers;  // [rows, key_width]: times the scale
  std::int64_t codes;    // [rows, key_width]: as integers, see paged_codes-inl.h
  std::int64_t steps;    // [rows, key_groups]: of the integers
  std::int64_t sums;     // [rows, key_groups]: of the numbers
  std::int64_t queries_size;

  // A partial result: largest [rows], total [rows], sum [rows, value_width].
  std::int64_t partial_size;

  // One worker's part.
  std::int64_t scores;  // [rows, split_width]
  std::int64_t scaled;  // [kDecodeRows, value_groups, split_width]: weights times scales
  std::int64_t tile;    // [kPagedPadding, the wider of both]: decoded rows
  std::int64_t runs;    // split_blocks of Run
  std::int64_t worker_size;

  explicit DecodePlan(const PagedAttentionParams& p) noexcept
      : group(p.n_q_heads / p.keys.shape.n_heads),
        rows(group * p.n_queries),
        n_heads(p.keys.shape.n_heads),
        block_size(p.keys.shape.block_size),
        lanes(formats::PageLayout{{}, p.keys.shape}.lanes()),
        split_blocks(std::max<std::int64_t>(1, kSplitTokens / block_size)),
        split(split_blocks * block_size),
        split_width(paged_padded(split)),
        key_width(paged_padded(p.keys.shape.head_dim)),
        value_width(paged_padded(p.values.shape.head_dim)),
        key_groups(formats::PageLayout{{}, p.keys.shape}.groups()),
        value_groups(formats::PageLayout{{}, p.values.shape}.groups()),
        numbers(0),
        codes(rows * key_width),
        steps(codes + rows * key_width),
        sums(steps + paged_padded(rows * key_groups)),
        queries_size(sums + paged_padded(rows * key_groups)),
        partial_size(paged_padded(2 * rows) + rows * value_width),
        scores(0),
        scaled(rows * split_width),
        tile(scaled + kDecodeRows * value_groups * split_width),
        runs(tile + kPagedPadding * std::max(key_width, value_width)),
        worker_size(runs + paged_padded(kRunSize * split_blocks)) {}

  std::int64_t n_splits(std::int64_t n_tokens) const noexcept {
    return (n_tokens + split - 1) / split;
  }

  // Scratch: first split of each sequence [batch + 1] (64-bit), queries, partial results, workers'
  // parts.

  std::int64_t first_splits_size(const PagedAttentionParams& p) const noexcept {
    return paged_padded(2 * (p.batch + 1));
  }
  std::size_t scratch_bytes(const PagedAttentionParams& p, std::int64_t n_workers) const noexcept {
    std::int64_t n = 0;
    for (std::int64_t b = 0; b < p.batch; ++b) n += n_splits(sequence_length(p, b));
    return sizeof(float) *
           static_cast<std::size_t>(first_splits_size(p) + p.batch * n_heads * queries_size +
                                    n * n_heads * partial_size + n_workers * worker_size);
  }

  /// Of a Run.
  static constexpr std::int64_t kRunSize = 8;
};

std::size_t paged_decode_scratch_bytes(const PagedAttentionParams& params,
                                       std::int64_t n_workers) noexcept;

/// The decode variants that this machine can run, fastest first; their prefill is left empty.
std::vector<PagedAttentionKernel> paged_decode_simd_kernels();

}  // namespace kvpool::kernels
