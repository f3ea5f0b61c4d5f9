#pragma once

#include <gmock/gmock.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cache/append_plan.h"
#include "kvpool/cache/page_view.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/paged_layer.h"
#include "kvpool/cache/paged_pool.h"

namespace kvpool::cache::testing {

using core::BlockPoolAllocator;
using core::Stream;
using formats::Format;

/// Tokens are numbered over a whole test; each has numbers of its own.
inline float number_of(std::int64_t token, int stream, std::int64_t head, std::int64_t dim) {
  return static_cast<float>(token * 64 + stream * 32 + head * 8 + dim) / 16;
}

/// Runs plans and reads views of one layer's shape.
struct Rows {
  std::int64_t heads;
  std::int64_t dims[2];

  explicit Rows(const PagedLayerSpec& spec)
      : heads(spec.n_kv_heads), dims{spec.key_dim, spec.value_dim} {}

  /// [heads, tokens, dim]
  std::vector<float> of(const std::vector<std::int64_t>& tokens, int stream) const {
    std::vector<float> rows;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (const std::int64_t token : tokens) {
        for (std::int64_t d = 0; d < dims[stream]; ++d) {
          rows.push_back(number_of(token, stream, h, d));
        }
      }
    }
    return rows;
  }
  void write(const AppendPlan& plan, const std::vector<std::int64_t>& tokens) const {
    std::vector<float> rows[2];
    kernels::SourceRows sources[2];
    for (int s = 0; s < 2; ++s) {
      rows[s] = of(tokens, s);
      sources[s] = {reinterpret_cast<const std::byte*>(rows[s].data()), Format::kFp32,
                    plan.n_tokens() * dims[s], dims[s]};
    }
    plan.run(sources[0], sources[1]);
  }
  /// The largest difference between what the view shows and these tokens.
  float error_of(const PageView& view, const std::vector<std::int64_t>& tokens) const {
    const auto n = static_cast<std::int64_t>(tokens.size());
    float error = view.length() == n ? 0.f : 1e9f;
    if (error != 0) return error;
    for (int s = 0; s < 2; ++s) {
      const std::vector<float> expected = of(tokens, s);
      std::vector<float> shown(static_cast<std::size_t>(n * dims[s]));
      for (std::int64_t h = 0; h < heads; ++h) {
        (s == 0) ? view.read_keys(h, 0, n, shown.data(), dims[s])
                 : view.read_values(h, 0, n, shown.data(), dims[s]);
        for (std::size_t i = 0; i < shown.size(); ++i) {
          const float difference =
              std::abs(shown[i] - expected[static_cast<std::size_t>(h) * shown.size() + i]);
          error = difference <= error ? error : difference;  // a NaN is the largest of all
        }
      }
    }
    return error;
  }
};

inline PagedLayerSpec small_spec() {
  PagedLayerSpec spec;
  spec.n_kv_heads = 2;
  spec.key_dim = 8;
  spec.value_dim = 4;
  spec.keys.recent = spec.values.recent = Format::kFp32;
  return spec;
}

inline std::shared_ptr<PagedPool> make_pool(std::int64_t n_blocks, std::int64_t block_size = 4,
                                            bool separate_kv = false,
                                            std::optional<std::int64_t> byte_budget = {}) {
  auto blocks = std::make_shared<BlockPoolAllocator>(
      core::PoolConfig{.block_size = block_size, .n_blocks = n_blocks, .separate_kv = separate_kv});
  return std::make_shared<PagedPool>(std::move(blocks),
                                     storage::PageStoreOptions{.byte_budget = byte_budget});
}

inline void check_all(const PagedPool& pool) {
  pool.allocator()->check_invariants();
  pool.store().check_invariants();
}

/// A layer and the tokens that it should hold.
struct Cache {
  std::unique_ptr<PagedLayer> layer;
  std::vector<std::int64_t> tokens;

  Rows rows() const { return Rows(layer->spec()); }
  void append(std::int64_t n, std::int64_t first_token) {
    const auto plan = layer->append(n);
    std::vector<std::int64_t> fresh;
    for (std::int64_t i = 0; i < n; ++i) fresh.push_back(first_token + i);
    rows().write(*plan, fresh);
    tokens.insert(tokens.end(), fresh.begin(), fresh.end());
  }
  float error() const {
    const auto view = layer->view();
    return rows().error_of(*view, {tokens.end() - view->length(), tokens.end()});
  }
};

inline Cache make_cache(const std::shared_ptr<PagedPool>& pool, OwnerId owner,
                        const PagedLayerSpec& spec = small_spec()) {
  return {std::make_shared<PagedGroup>(pool, owner)->add_layer(spec), {}};
}

}  // namespace kvpool::cache::testing
