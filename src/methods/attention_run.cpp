#include "kvpool/methods/attention_run.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kvpool/methods/linear_map.h"

namespace kvpool::methods {

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

AttentionRun::AttentionRun(CodecPair codecs, const float* queries, std::int64_t n_queries,
                           const std::int64_t* visible_end, float scale,
                           const kernels::RowKernels& kernels)
    : codecs_(codecs),
      kernels_(kernels),
      n_queries_(n_queries),
      key_stride_(kernels::padded_row(codecs.keys->code_dims())),
      value_stride_(kernels::padded_row(codecs.values->code_dims())),
      visible_end_(visible_end, visible_end + n_queries),
      states_(size(n_queries), {-std::numeric_limits<float>::infinity(), 0}),
      queries_(size(n_queries * key_stride_)),
      sums_(size(n_queries * value_stride_)),
      scores_(size(n_queries * kTile)),
      shrinks_(size(n_queries)),
      seen_(size(n_queries)),
      rows_(size(kTile * std::max(key_stride_, value_stride_))),
      scratch_(size(
          std::max(codecs.keys->scratch_floats(kTile), codecs.values->scratch_floats(kTile)))) {
  for (std::int64_t i = 0; i < n_queries; ++i) {
    float* query = queries_.data() + i * key_stride_;
    codecs_.keys->enter(queries + i * codecs_.keys->head_dim(), query);
    for (std::int64_t j = 0; j < key_stride_; ++j) query[j] *= scale;
  }
}

void AttentionRun::add(ConstPage keys, ConstPage values, TokenRange range,
                       std::int64_t position) noexcept {
  for (std::int64_t done = 0; done < range.count; done += kTile) {
    const TokenRange tile{range.first + done, std::min(kTile, range.count - done)};
    std::int64_t most_seen = 0;
    for (std::int64_t i = 0; i < n_queries_; ++i) {
      seen_[size(i)] =
          std::clamp<std::int64_t>(visible_end_[size(i)] - position - done, 0, tile.count);
      most_seen = std::max(most_seen, seen_[size(i)]);
    }
    if (most_seen == 0) continue;

    const TokenRange used{tile.first, most_seen};
    codecs_.keys->decode(keys, used, kernels_, {rows_.data(), key_stride_}, scratch_.data());
    for (std::int64_t i = 0; i < n_queries_; ++i) {
      const std::int64_t seen = seen_[size(i)];
      if (seen == 0) continue;
      float* scores = scores_.data() + i * kTile;
      kernels_.dot_rows(queries_.data() + i * key_stride_, {rows_.data(), key_stride_}, seen,
                        key_stride_, scores);
      shrinks_[size(i)] = kernels_.soften(scores, seen, states_[size(i)]);
    }
    codecs_.values->decode(values, used, kernels_, {rows_.data(), value_stride_}, scratch_.data());
    for (std::int64_t i = 0; i < n_queries_; ++i) {
      const std::int64_t seen = seen_[size(i)];
      if (seen == 0) continue;
      kernels_.add_rows(scores_.data() + i * kTile, {rows_.data(), value_stride_}, seen,
                        value_stride_, shrinks_[size(i)], sums_.data() + i * value_stride_);
    }
  }
}

void AttentionRun::merge(std::int64_t i, kernels::RunningSoftmax& into,
                         float* output) const noexcept {
  const kernels::RunningSoftmax& state = states_[size(i)];
  if (state.total == 0) return;
  const std::int64_t dims = codecs_.values->head_dim();
  float found[kMaxDims];
  codecs_.values->leave(sums_.data() + i * value_stride_, found);
  const float largest = std::max(into.largest, state.largest);
  const float old_weight = std::exp(into.largest - largest);
  const float new_weight = std::exp(state.largest - largest);
  for (std::int64_t j = 0; j < dims; ++j) {
    output[j] = output[j] * old_weight + found[j] * new_weight;
  }
  into = {largest, into.total * old_weight + state.total * new_weight};
}

}  // namespace kvpool::methods
