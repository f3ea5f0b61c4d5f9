// Attention of one and of 128 queries over the pages of a method, next to pages of half floats: 32
// q heads, 8 kv heads, 128 dims, blocks of 32 tokens, 2 bits.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attended_pages.h"
#include "kvpool/base/aligned_buffer.h"
#include "kvpool/cache/attend_pages.h"
#include "kvpool/cache/method_formats.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/paged_layer.h"
#include "kvpool/cache/paged_pool.h"
#include "kvpool/kernels/worker_pool.h"
#include "kvpool/methods/registry.h"

namespace kvpool::cache {
namespace {

using benchmarks::kDim;
using benchmarks::kKvHeads;
using benchmarks::kQHeads;
using benchmarks::normal;

constexpr std::int64_t kBlock = 32;

PagedLayerSpec spec_of(const std::string& method) {
  PagedLayerSpec spec{kKvHeads, kDim, kDim, {}, {}, 0};
  if (method == "fp16") return spec;
  const auto made = methods::make_method({.method = method, .residual_length = 0});
  spec.keys = method_keys(made, kKvHeads, kBlock, formats::Format::kFp16);
  spec.values = method_values(made, kKvHeads, kBlock, formats::Format::kFp16);
  return spec;
}

/// A layer of `n_tokens`, `n_queries` queries at its end, causal.
void attend(benchmark::State& state, const std::string& method) {
  const std::int64_t n_tokens = state.range(0);
  const std::int64_t n_queries = state.range(1);
  kernels::WorkerPool workers(static_cast<int>(state.range(2)));
  const auto pool = std::make_shared<PagedPool>(std::make_shared<core::BlockPoolAllocator>(
      core::PoolConfig{.block_size = kBlock, .n_blocks = 4 * (n_tokens / kBlock + 1)}));
  const auto group = std::make_shared<PagedGroup>(pool, OwnerId{1});
  const auto layer = group->add_layer(spec_of(method));
  const std::vector<float> rows = normal(kKvHeads * n_tokens * kDim);
  const kernels::SourceRows source{reinterpret_cast<const std::byte*>(rows.data()),
                                   formats::Format::kFp32, n_tokens * kDim, kDim};
  layer->append(n_tokens)->run(source, source);

  const auto view = layer->view();
  const std::vector<float> queries = normal(kQHeads * n_queries * kDim);
  std::vector<float> output(queries.size());
  const std::int32_t indptr[] = {0, static_cast<std::int32_t>(view->n_pages())};
  const auto last_page_len = static_cast<std::int32_t>(view->last_page_len());
  kernels::PagedAttentionParams p =
      benchmarks::causal_attention(formats::Format::kFp32, queries, output, n_queries);
  p.keys = {view->keys().pages.data(), view->n_pages(), view->keys().layout->shape()};
  p.values = {view->values().pages.data(), view->n_pages(), view->values().layout->shape()};
  p.indptr = indptr;
  p.last_page_len = &last_page_len;
  const StreamLayout& keys = *view->keys().layout;
  const StreamLayout& values = *view->values().layout;
  AlignedBuffer scratch(attend_pages_scratch_bytes(p, keys, values, workers.n_threads()));
  for (auto _ : state) {
    attend_pages(p, keys, values, scratch.data(), &workers);
    benchmark::DoNotOptimize(output.data());
  }
  state.counters["bytes a token"] =
      static_cast<double>(layer->nbytes()) / static_cast<double>(n_tokens * kKvHeads);
}

const bool kRegistered = [] {
  std::vector<std::string> names{"fp16"};
  for (const auto& row : methods::methods()) names.emplace_back(row.name);
  for (const std::string& name : names) {
    benchmark::RegisterBenchmark(std::string("attend/").append(name).c_str(),
                                 [name](benchmark::State& state) { attend(state, name); })
        ->ArgNames({"tokens", "queries", "threads"})
        ->Args({4096, 1, 1})
        ->Args({4096, 1, 2})
        ->Args({4096, 128, 1})
        ->Unit(benchmark::kMicrosecond)
        ->UseRealTime();
  }
  return true;
}();

}  // namespace
}  // namespace kvpool::cache
