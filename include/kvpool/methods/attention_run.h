#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// A codec for keys and one for values.
struct CodecPair {
  const StreamCodec* keys = nullptr;
  const StreamCodec* values = nullptr;
};

/// Attention of some queries over the tokens of one head, page after page, without rebuilding a
/// vector: queries enter code space once, each run of tokens is decoded once for all queries while
/// it is in the cache, and the weighted sums leave code space at the end. Scores, softmax and sums
/// are fp32.
///
/// Tokens coded by another pair take another AttentionRun; merge() joins what they found.
class AttentionRun {
 public:
  /// `queries` [n_queries, head_dim]. Query i sees the tokens before position visible_end[i].
  /// `scale` multiplies the scores. The codecs outlive the run; the other arrays are not kept.
  AttentionRun(CodecPair codecs, const float* queries, std::int64_t n_queries,
               const std::int64_t* visible_end, float scale, const kernels::RowKernels& kernels);

  /// Adds tokens `range` of a page, the first of which is at `position`.
  void add(ConstPage keys, ConstPage values, TokenRange range, std::int64_t position) noexcept;

  /// Adds what query i found to `output` [head_dim], which holds the value sum of state `into`;
  /// divided by into.total it is the attention. Start from zeros and {-infinity, 0}.
  void merge(std::int64_t i, kernels::RunningSoftmax& into, float* output) const noexcept;

  std::int64_t n_queries() const noexcept { return n_queries_; }

 private:
  /// Tokens decoded at once: their rows stay in the first-level cache.
  static constexpr std::int64_t kTile = 32;

  CodecPair codecs_;
  const kernels::RowKernels& kernels_;
  std::int64_t n_queries_;
  std::int64_t key_stride_;
  std::int64_t value_stride_;
  std::vector<std::int64_t> visible_end_;
  std::vector<kernels::RunningSoftmax> states_;
  /// [n_queries, key_stride] in the keys' code space, times the scale.
  std::vector<float> queries_;
  /// [n_queries, value_stride] in the values' code space.
  std::vector<float> sums_;
  /// [n_queries, kTile] scores, then weights.
  std::vector<float> scores_;
  /// By which each query's sum shrinks, and how many of the tile's tokens it sees.
  std::vector<float> shrinks_;
  std::vector<std::int64_t> seen_;
  /// [kTile, larger stride].
  std::vector<float> rows_;
  std::vector<float> scratch_;
};

}  // namespace kvpool::methods
