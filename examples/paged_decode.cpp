// A decode loop whose keys and values lie in blocks: a prompt is written once, two continuations
// share its blocks by reference, and blocks that have aged are kept in int8. Links kvpool::cache.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "kvpool/cache/paged_sequence.h"

namespace {

using kvpool::cache::PagedSequence;
using kvpool::formats::Format;

constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kQueryHeads = 8;
constexpr std::int64_t kDim = 64;
constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kPrompt = 100;
constexpr std::int64_t kSteps = 60;

// A stand-in for the model's projections, [heads, tokens, dim]: any numbers do.
std::vector<float> rows(std::int64_t heads, std::int64_t first, std::int64_t n, float phase) {
  std::vector<float> out;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t t = first; t < first + n; ++t) {
      for (std::int64_t d = 0; d < kDim; ++d) {
        out.push_back(std::sin(phase + 0.01f * static_cast<float>((t + 1) * (d + 1) + h)));
      }
    }
  }
  return out;
}

kvpool::kernels::SourceRows source(const std::vector<float>& numbers, std::int64_t n) {
  return {reinterpret_cast<const std::byte*>(numbers.data()), Format::kFp32, n * kDim, kDim};
}

// What a model does with its cache for n tokens. Returns a number of the last output.
float forward(PagedSequence& sequence, std::int64_t n, float phase) {
  std::vector<float> output(kQueryHeads * static_cast<std::size_t>(n * kDim));
  const std::int64_t first = sequence.length();
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const auto keys = rows(kHeads, first, n, phase);
    const auto values = rows(kHeads, first, n, phase + 1);
    const auto queries = rows(kQueryHeads, first, n, phase + 2);
    sequence.append(layer, n, source(keys, n), source(values, n));
    sequence.attend(layer, kQueryHeads, n, source(queries, n),
                    {reinterpret_cast<std::byte*>(output.data()), Format::kFp32, n * kDim, kDim});
  }
  return output.back();
}

}  // namespace

int main() {
  auto blocks = std::make_shared<kvpool::core::BlockPoolAllocator>(
      kvpool::core::PoolConfig{.block_size = 16, .n_blocks = 512});
  const auto pool = std::make_shared<kvpool::cache::PagedPool>(
      blocks, kvpool::storage::PageStoreOptions{.byte_budget = 8 << 20},
      std::make_shared<kvpool::kernels::WorkerPool>());

  kvpool::cache::PagedLayerSpec spec;
  spec.n_kv_heads = kHeads;
  spec.key_dim = spec.value_dim = kDim;
  spec.keys.recent = spec.values.recent = Format::kFp16;
  spec.keys.tiers = spec.values.tiers = {{64, Format::kInt8, nullptr}};

  PagedSequence first(pool, 1, spec, kLayers);
  forward(first, kPrompt, 0);
  PagedSequence second = first.fork(2);
  std::printf("after the fork:  %3lld blocks in use, %7lld bytes\n",
              static_cast<long long>(blocks->stats().blocks_in_use()),
              static_cast<long long>(pool->store().stats().used_bytes));

  float outputs[2] = {};
  for (std::int64_t step = 0; step < kSteps; ++step) {
    outputs[0] = forward(first, 1, 0.1f);
    outputs[1] = forward(second, 1, 0.2f);
  }
  std::printf("after %lld steps:  %3lld blocks in use, %7lld bytes\n",
              static_cast<long long>(kSteps),
              static_cast<long long>(blocks->stats().blocks_in_use()),
              static_cast<long long>(pool->store().stats().used_bytes));

  first.release();
  second.release();
  const bool differ = outputs[0] != outputs[1];
  const bool clean = blocks->stats().blocks_in_use() == 0 && pool->store().stats().n_used == 0;
  std::printf("the continuations %s; %s\n", differ ? "differ" : "are the same",
              clean ? "everything is given back" : "something is left");
  return differ && clean ? 0 : 1;
}
