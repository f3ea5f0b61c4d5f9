#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvpool/kernels/paged_attention.h"

namespace kvpool::kernels {

/// How attention of many queries is cut into items of work.
///
/// An item is one kv head of one sequence, and of its q heads and queries a tile of at most kRows
/// *rows*, a row being one query of one q head. It goes over the tokens that its rows see in tiles
/// of kTokens, which start at multiples of kTokens in the sequence. What a row computes depends on
/// neither the other rows nor how rows were cut, so items may be cut to suit the number of workers.
struct PrefillPlan {
  static constexpr std::int64_t kRows = 256;
  static constexpr std::int64_t kTokens = 64;
  /// Rows are padded to a multiple of this, which every vector's length divides.
  static constexpr std::int64_t kRowStep = 16;
  static_assert(kRows % kRowStep == 0);

  std::int64_t group;    // q heads of a kv head
  std::int64_t heads;    // q heads of an item, at most
  std::int64_t queries;  // queries of an item, at most

  PrefillPlan(const PagedAttentionParams& p, std::int64_t n_workers) noexcept
      : group(p.n_q_heads / p.keys.shape.n_heads) {
    heads = std::min(group, kRows);
    queries = std::min(kRows / heads, p.n_queries);
    // At least two items a worker, where that leaves them 32 rows.
    while (n_workers > 1 && n_items(p) < 2 * n_workers && heads * queries >= 64) {
      std::int64_t& larger = queries > 1 ? queries : heads;
      larger = tiles(larger, 2);
    }
  }

  std::int64_t head_tiles() const noexcept { return tiles(group, heads); }
  std::int64_t query_tiles(const PagedAttentionParams& p) const noexcept {
    return tiles(p.n_queries, queries);
  }
  std::int64_t n_items(const PagedAttentionParams& p) const noexcept {
    return p.batch * p.keys.shape.n_heads * head_tiles() * query_tiles(p);
  }

  static constexpr std::int64_t tiles(std::int64_t n, std::int64_t size) noexcept {
    return (n + size - 1) / size;
  }
  static constexpr std::int64_t padded(std::int64_t n) noexcept {
    return tiles(n, kRowStep) * kRowStep;
  }
};

/// One item's memory. Strides are padded by a cache line: rows whose distance is a large power of
/// two would share a few sets of the cache.
struct PrefillScratch {
  std::int64_t rows;          // capacity, padded
  std::int64_t key_stride;    // of `keys`
  std::int64_t value_stride;  // of `values` and `sums`
  std::int64_t row_stride;    // of `scores` and `bias`
  std::size_t floats;         // all of it

  float* queries = nullptr;  // panels of [key head_dim, rows of a panel]
  float* keys = nullptr;     // [kTokens, key_stride]
  float* values = nullptr;   // [kTokens, value_stride]
  float* scores = nullptr;   // [kTokens, row_stride]
  float* bias = nullptr;     // [kTokens, row_stride], where there is a mask
  float* sums = nullptr;     // [rows, value_stride]
  float* largest = nullptr;  // [rows]
  float* total = nullptr;    // [rows]
  float* shrink = nullptr;   // [rows]
  float* row = nullptr;      // one query or output

  /// Without memory: what it takes.
  PrefillScratch(const PagedAttentionParams& p, const PrefillPlan& plan) noexcept {
    rows = PrefillPlan::padded(plan.heads * plan.queries);
    key_stride = PrefillPlan::padded(p.keys.shape.head_dim) + 16;
    value_stride = PrefillPlan::padded(p.values.shape.head_dim) + 16;
    row_stride = rows + 16;
    floats = lay_out(p, nullptr);
  }

  /// The part of `worker` in `memory`, aligned to 64.
  PrefillScratch(const PagedAttentionParams& p, const PrefillPlan& plan, std::byte* memory,
                 std::int64_t worker) noexcept
      : PrefillScratch(p, plan) {
    lay_out(p, reinterpret_cast<float*>(memory) + worker * static_cast<std::int64_t>(floats));
  }

 private:
  std::size_t lay_out(const PagedAttentionParams& p, float* memory) noexcept {
    std::int64_t used = 0;
    const auto take = [&](float*& part, std::int64_t n) {
      if (memory != nullptr) part = memory + used;
      used += PrefillPlan::padded(n);
    };
    take(queries, p.keys.shape.head_dim * rows);
    take(keys, PrefillPlan::kTokens * key_stride);
    take(values, PrefillPlan::kTokens * value_stride);
    take(scores, PrefillPlan::kTokens * row_stride);
    take(bias, p.mask_kind == MaskKind::kNone ? 0 : PrefillPlan::kTokens * row_stride);
    take(sums, rows * value_stride);
    take(largest, rows);
    take(total, rows);
    take(shrink, rows);
    take(row, std::max(key_stride, value_stride));
    return static_cast<std::size_t>(used);
  }
};

}  // namespace kvpool::kernels
