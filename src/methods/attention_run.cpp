#include "kvpool/methods/attention_run.h"

#include <cmath>

#include "kvpool/methods/linear_map.h"

namespace kvpool::methods {
namespace {

std::size_t index(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t padded(std::int64_t n) { return kernels::padded_row(n); }

static_assert(sizeof(kernels::RunningSoftmax) == 2 * sizeof(float));

/// Floats of the states and debts of n_rows.
std::int64_t head_floats(const CodeSpaces& spaces, std::int64_t n_rows) {
  return padded((2 + spaces.n) * n_rows);
}

std::int64_t largest_stride(const CodeSpaces& spaces) {
  std::int64_t stride = 0;
  for (std::int64_t s = 0; s < spaces.n; ++s) {
    stride = std::max({stride, spaces.key_stride(s), spaces.value_stride(s)});
  }
  return stride;
}

}  // namespace

std::int64_t AttentionRun::query_floats(const CodeSpaces& spaces, std::int64_t n_rows) noexcept {
  std::int64_t floats = 0;
  for (std::int64_t s = 0; s < spaces.n; ++s) floats += n_rows * spaces.key_stride(s);
  return floats;
}

std::int64_t AttentionRun::sum_floats(const CodeSpaces& spaces, std::int64_t n_rows) noexcept {
  std::int64_t floats = head_floats(spaces, n_rows);
  for (std::int64_t s = 0; s < spaces.n; ++s) floats += n_rows * spaces.value_stride(s);
  return floats;
}

std::int64_t AttentionRun::work_floats(const CodeSpaces& spaces, std::int64_t n_rows) noexcept {
  std::int64_t scratch = 0;
  for (std::int64_t s = 0; s < spaces.n; ++s) {
    const CodecPair& pair = spaces.spaces[index(s)];
    scratch =
        std::max({scratch, pair.keys->scratch_floats(kTile), pair.values->scratch_floats(kTile)});
  }
  return n_rows * kTile + kTile * largest_stride(spaces) + padded(scratch);
}

AttentionRun::AttentionRun(const CodeSpaces& spaces, std::int64_t n_rows,
                           const kernels::RowKernels& kernels, const Memory& memory) noexcept
    : spaces_(spaces),
      kernels_(kernels),
      n_rows_(n_rows),
      states_(reinterpret_cast<kernels::RunningSoftmax*>(memory.sums)),
      owed_(memory.sums + 2 * n_rows),
      scores_(memory.work),
      rows_(memory.work + n_rows * kTile),
      scratch_(rows_ + kTile * largest_stride(spaces)) {
  float* queries = memory.queries;
  float* sums = memory.sums + head_floats(spaces, n_rows);
  for (std::int64_t s = 0; s < spaces.n; ++s) {
    queries_[index(s)] = queries;
    sums_[index(s)] = sums;
    queries += n_rows * spaces.key_stride(s);
    sums += n_rows * spaces.value_stride(s);
  }
}

void AttentionRun::enter(std::int64_t row, const float* query, float scale) const noexcept {
  for (std::int64_t s = 0; s < spaces_.n; ++s) {
    const StreamCodec& codec = *spaces_.spaces[index(s)].keys;
    float* const entered = query_at(s, row);
    codec.enter(query, entered);
    std::fill(entered + codec.code_dims(), entered + spaces_.key_stride(s), 0.0f);
    for (std::int64_t j = 0; j < codec.code_dims(); ++j) entered[j] *= scale;
  }
}

void AttentionRun::see(std::int64_t row, std::int64_t begin, std::int64_t end) noexcept {
  begin_[index(row)] = begin;
  end_[index(row)] = end;
}

void AttentionRun::clear() const noexcept {
  std::fill_n(states_, n_rows_, kernels::RunningSoftmax{kNothing, 0});
  std::fill_n(owed_, spaces_.n * n_rows_, 1.0f);
  for (std::int64_t s = 0; s < spaces_.n; ++s) {
    std::fill_n(sums_[index(s)], n_rows_ * spaces_.value_stride(s), 0.0f);
  }
  // Decoding leaves padding as it was, which meets zeros, and zero times NaN is NaN.
  std::fill(rows_, scores_ + work_floats(spaces_, n_rows_), 0.0f);
}

TokenRange AttentionRun::look(std::int64_t position, std::int64_t count) noexcept {
  std::int64_t first = count;
  std::int64_t last = 0;
  for (std::int64_t row = 0; row < n_rows_; ++row) {
    const std::int64_t begin = std::clamp<std::int64_t>(begin_[index(row)] - position, 0, count);
    const std::int64_t end = std::clamp<std::int64_t>(end_[index(row)] - position, 0, count);
    parts_[index(row)] = {begin, std::max<std::int64_t>(0, end - begin)};
    if (end <= begin) continue;
    first = std::min(first, begin);
    last = std::max(last, end);
  }
  return {first, std::max<std::int64_t>(0, last - first)};
}

void AttentionRun::sum(std::int64_t space, TokenRange seen) noexcept {
  const std::int64_t stride = spaces_.value_stride(space);
  for (std::int64_t row = 0; row < n_rows_; ++row) {
    const TokenRange part = parts_[index(row)];
    if (part.count == 0) continue;
    const float shrink = shrinks_[index(row)];
    for (std::int64_t s = 0; s < spaces_.n; ++s) owed(s, row) *= shrink;
    kernels_.add_rows(scores_ + row * kTile, {rows_ + (part.first - seen.first) * stride, stride},
                      part.count, stride, owed(space, row), sum_at(space, row));
    owed(space, row) = 1;
  }
}

void AttentionRun::merge(const AttentionRun& later) const noexcept {
  for (std::int64_t row = 0; row < n_rows_; ++row) {
    const kernels::RunningSoftmax found = later.states_[row];
    if (found.total == 0) continue;
    kernels::RunningSoftmax& state = states_[row];
    const float largest = std::max(state.largest, found.largest);
    const float old_weight = std::exp(state.largest - largest);
    const float new_weight = std::exp(found.largest - largest);
    for (std::int64_t s = 0; s < spaces_.n; ++s) {
      const float ours = owed(s, row) * old_weight;
      const float theirs = later.owed(s, row) * new_weight;
      float* const sums = sum_at(s, row);
      const float* const added = later.sum_at(s, row);
      for (std::int64_t j = 0; j < spaces_.value_stride(s); ++j) {
        sums[j] = sums[j] * ours + added[j] * theirs;
      }
      owed(s, row) = 1;
    }
    state = {largest, state.total * old_weight + found.total * new_weight};
  }
}

void AttentionRun::finish(std::int64_t row, float* output, float sink) const noexcept {
  const std::int64_t dims = spaces_.spaces[0].values->head_dim();
  std::fill_n(output, dims, 0.0f);
  const kernels::RunningSoftmax state = states_[row];
  if (state.total == 0) return;
  const float largest = std::max(state.largest, sink);
  const float weight = std::exp(state.largest - largest);
  const float share = weight / (state.total * weight + std::exp(sink - largest));
  float vector[kMaxDims];
  for (std::int64_t s = 0; s < spaces_.n; ++s) {
    spaces_.spaces[index(s)].values->leave(sum_at(s, row), vector);
    const float factor = share * owed(s, row);
    for (std::int64_t j = 0; j < dims; ++j) output[j] += vector[j] * factor;
  }
}

}  // namespace kvpool::methods
