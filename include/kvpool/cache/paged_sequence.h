#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/base/aligned_buffer.h"
#include "kvpool/cache/page_view.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/paged_layer.h"
#include "kvpool/cache/paged_pool.h"
#include "kvpool/kernels/page_append.h"

namespace kvpool::cache {

/// How a PagedSequence attends.
struct AttendOptions {
  /// 1 / sqrt(key_dim) where empty.
  std::optional<float> scale;
  /// Query i of n sees tokens up to offset - n + i; otherwise all. The layer's window applies to
  /// causal queries.
  bool causal = true;
  /// [n_q_heads]: one more logit a head, whose value is zero; or null.
  const float* sinks = nullptr;
};

/// The keys and values of one sequence in blocks of a pool, for inference engines that work on
/// plain memory: each call does its work before it returns.
///
///   PagedSequence sequence(pool, owner, spec, n_layers);
///   for each step, for each layer: sequence.append(layer, ...); sequence.attend(layer, ...);
///
/// Rows and queries are [heads, tokens, dim] with any strides of heads and tokens
/// (kernels::HeadRows) in fp32, fp16 or bf16. Layers move together, as PagedGroup says: running out
/// moves none of them, and a step that was cut short is rolled back by the next.
///
/// One thread at a time; forks are independent of each other. attend() shares the pool's workers.
class PagedSequence {
 public:
  /// Throws InvalidArgument where `n_layers` < 1, `pool` is null or `spec` out of range.
  PagedSequence(std::shared_ptr<PagedPool> pool, OwnerId owner, const PagedLayerSpec& spec,
                std::int64_t n_layers = 1);
  /// A spec for each layer, at least one.
  PagedSequence(std::shared_ptr<PagedPool> pool, OwnerId owner,
                const std::vector<PagedLayerSpec>& specs);

  PagedGroup& group() const noexcept { return *layers_.front()->group(); }
  std::int64_t n_layers() const noexcept { return static_cast<std::int64_t>(layers_.size()); }
  /// Throws InvalidArgument out of range.
  PagedLayer& layer(std::int64_t index) const;
  /// Tokens of layer 0, those behind its window included.
  std::int64_t length() const { return layers_.front()->offset(); }

  /// Appends n_tokens (>= 1) to a layer: keys [n_kv_heads, n_tokens, key_dim], values
  /// [n_kv_heads, n_tokens, value_dim]. Throws StepExhausted, LeaseLost and InvalidArgument; then
  /// nothing changed.
  void append(std::int64_t layer, std::int64_t n_tokens, const kernels::SourceRows& keys,
              const kernels::SourceRows& values);

  /// Attention of the last positions' queries, [n_q_heads, n_queries, key_dim], over the layer;
  /// `output`, in the queries' format, is [n_q_heads, n_queries, value_dim]. n_kv_heads divides
  /// n_q_heads. Throws InvalidArgument, and LeaseLost.
  void attend(std::int64_t layer, std::int64_t n_q_heads, std::int64_t n_queries,
              const kernels::SourceRows& queries, const kernels::TargetRows& output,
              const AttendOptions& options = {});

  /// Drops up to `n_tokens` (>= 0) of the newest tokens from every layer and returns how many: as
  /// many as the shortest layer can; 0 once a window has closed over tokens. Throws LeaseLost.
  std::int64_t trim(std::int64_t n_tokens);
  /// A copy for `owner`, or a new owner of the pool, that shares every block until one of the two
  /// writes to it. Throws LeaseLost.
  PagedSequence fork(std::optional<OwnerId> owner = std::nullopt) const;
  /// Gives every block back: the sequence is empty.
  void release() noexcept { group().release(); }

 private:
  explicit PagedSequence(std::vector<std::unique_ptr<PagedLayer>> layers) noexcept
      : layers_(std::move(layers)) {}

  std::vector<std::unique_ptr<PagedLayer>> layers_;
  AlignedBuffer scratch_;
};

}  // namespace kvpool::cache
