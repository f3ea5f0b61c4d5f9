#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kvpool/kernels/row_kernels.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// A codec for keys and one for values.
struct CodecPair {
  const StreamCodec* keys = nullptr;
  const StreamCodec* values = nullptr;
};

/// The code spaces that the tokens of a head lie in: of a method's codec, and of exact tokens, say.
/// A key may lie in another one than its value.
struct CodeSpaces {
  static constexpr std::int64_t kMost = 2;

  std::array<CodecPair, kMost> spaces;
  std::int64_t n = 0;

  /// Floats of a padded row of keys or values of space s.
  std::int64_t key_stride(std::int64_t s) const noexcept {
    return kernels::padded_row(spaces[static_cast<std::size_t>(s)].keys->code_dims());
  }
  std::int64_t value_stride(std::int64_t s) const noexcept {
    return kernels::padded_row(spaces[static_cast<std::size_t>(s)].values->code_dims());
  }
};

/// Attention of some queries, the *rows*, over the tokens of one head, without rebuilding a vector:
/// queries enter code space once, each run of tokens is decoded once for all rows while it is in
/// the cache, and the weighted sums leave code space at the end. Scores, softmax and sums are fp32.
///
/// A run is a view of memory of the caller's: runs over the same queries may share them, and what a
/// run over part of the tokens found can be merged into another's.
class AttentionRun {
 public:
  /// Most rows of a run.
  static constexpr std::int64_t kMaxRows = 64;
  /// Most tokens of a tile, which are decoded at once: their rows stay in the first-level cache.
  static constexpr std::int64_t kTile = 32;

  /// Floats of each kind of memory for n_rows; multiples of 16, so that one block can hold all.
  static std::int64_t query_floats(const CodeSpaces& spaces, std::int64_t n_rows) noexcept;
  static std::int64_t sum_floats(const CodeSpaces& spaces, std::int64_t n_rows) noexcept;
  static std::int64_t work_floats(const CodeSpaces& spaces, std::int64_t n_rows) noexcept;

  /// Changes no score.
  struct NoBias {};

  struct Memory {
    /// Written by enter() alone.
    float* queries = nullptr;
    /// What was found: written by clear(), add() and merge().
    float* sums = nullptr;
    /// Scratch of add(); what it holds between calls means nothing, but is finite where the tokens
    /// are.
    float* work = nullptr;
  };

  /// `spaces` outlives the run. 1 <= n_rows <= kMaxRows. Call clear() before tokens are added.
  AttentionRun(const CodeSpaces& spaces, std::int64_t n_rows, const kernels::RowKernels& kernels,
               const Memory& memory) noexcept;

  std::int64_t n_rows() const noexcept { return n_rows_; }
  const kernels::RowKernels& kernels() const noexcept { return kernels_; }

  /// The query of a row, [head_dim of the keys]; `scale` multiplies its scores.
  void enter(std::int64_t row, const float* query, float scale) const noexcept;
  /// The row sees positions [begin, end).
  void see(std::int64_t row, std::int64_t begin, std::int64_t end) noexcept;
  /// Nothing found yet; also prepares the scratch.
  void clear() const noexcept;

  /// Adds `count` <= kTile tokens, the first at `position`, whose keys and values lie in those
  /// spaces. Of them some range is decoded by
  ///
  ///   decode_keys(range, FloatRows out, float* scratch), decode_values(...)
  ///
  /// counted from the tile's start, and bias(row, position, count, scores) may change
  /// the scores of tokens that a row sees; -infinity hides a token.
  template <class DecodeKeys, class DecodeValues, class Bias>
  void add(std::int64_t key_space, std::int64_t value_space, std::int64_t position,
           std::int64_t count, DecodeKeys decode_keys, DecodeValues decode_values,
           Bias bias) noexcept {
    const TokenRange seen = look(position, count);
    if (seen.count == 0) return;
    const kernels::FloatRows keys{rows_, spaces_.key_stride(key_space)};
    decode_keys(seen, keys, scratch_);
    score(key_space, seen, position, bias);
    const kernels::FloatRows values{rows_, spaces_.value_stride(value_space)};
    decode_values(seen, values, scratch_);
    sum(value_space, seen);
  }

  /// Adds what `later`, of the same spaces and as many rows, found.
  void merge(const AttentionRun& later) const noexcept;

  /// The attention of a row, [head_dim of the values]: zeros where it saw no token. `sink` is one
  /// more score, of a value that is zero.
  void finish(std::int64_t row, float* output,
              float sink = -std::numeric_limits<float>::infinity()) const noexcept;

 private:
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();

  /// Finds parts_ and returns the tokens of a tile that some row sees.
  TokenRange look(std::int64_t position, std::int64_t count) noexcept;
  void sum(std::int64_t space, TokenRange seen) noexcept;

  template <class Bias>
  void score(std::int64_t space, TokenRange seen, std::int64_t position, Bias bias) noexcept {
    const std::int64_t stride = spaces_.key_stride(space);
    for (std::int64_t row = 0; row < n_rows_; ++row) {
      TokenRange& part = parts_[static_cast<std::size_t>(row)];
      if (part.count == 0) continue;
      float* const scores = scores_ + row * kTile;
      kernels_.dot_rows(query_at(space, row), {rows_ + (part.first - seen.first) * stride, stride},
                        part.count, stride, scores);
      if constexpr (!std::is_same_v<Bias, NoBias>) {
        bias(row, position + part.first, part.count, scores);
        // A row all of whose tokens are hidden has nothing to compare weights with.
        if (std::all_of(scores, scores + part.count, [](float s) { return s == kNothing; })) {
          part.count = 0;
          continue;
        }
      }
      shrinks_[static_cast<std::size_t>(row)] = kernels_.soften(scores, part.count, states()[row]);
    }
  }

  float* query_at(std::int64_t space, std::int64_t row) const noexcept {
    return queries_[static_cast<std::size_t>(space)] + row * spaces_.key_stride(space);
  }
  float* sum_at(std::int64_t space, std::int64_t row) const noexcept {
    return sums_[static_cast<std::size_t>(space)] + row * spaces_.value_stride(space);
  }
  kernels::RunningSoftmax* states() const noexcept { return states_; }
  /// By what the sums of a space still have to shrink.
  float& owed(std::int64_t space, std::int64_t row) const noexcept {
    return owed_[space * n_rows_ + row];
  }

  const CodeSpaces& spaces_;
  const kernels::RowKernels& kernels_;
  std::int64_t n_rows_;
  // Queries of each space: [n_rows, key_stride].
  std::array<float*, CodeSpaces::kMost> queries_{};
  // [n_rows]
  kernels::RunningSoftmax* states_;
  // [n spaces, n_rows]
  float* owed_;
  // Sums of each space: [n_rows, value_stride].
  std::array<float*, CodeSpaces::kMost> sums_{};
  // [n_rows, kTile] scores, then weights.
  float* scores_;
  // [kTile, largest stride]
  float* rows_;
  float* scratch_;
  std::array<std::int64_t, kMaxRows> begin_{};
  std::array<std::int64_t, kMaxRows> end_{};
  // Of the tile: what each row sees, counted from the tile's start.
  std::array<TokenRange, kMaxRows> parts_{};
  std::array<float, kMaxRows> shrinks_{};
};

}  // namespace kvpool::methods
