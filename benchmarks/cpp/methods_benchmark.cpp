// Quantised caches of one head: attend by kernel and length, append, and making a method.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kvpool/kernels/row_kernels.h"
#include "kvpool/methods/quantized_kv_cache.h"
#include "kvpool/methods/registry.h"

namespace kvpool::methods {
namespace {

constexpr std::int64_t kDims = 128;

std::vector<float> normal(std::int64_t n) {
  std::mt19937 random(7);
  std::normal_distribution<float> distribution;
  std::vector<float> numbers(static_cast<std::size_t>(n * kDims));
  for (float& number : numbers) number = distribution(random);
  return numbers;
}

void attend(benchmark::State& state, const KVCacheConfig& config,
            const kernels::RowKernels& kernels) {
  const std::int64_t n_tokens = state.range(0);
  const std::vector<float> rows = normal(n_tokens);
  QuantizedKVCache cache(config);
  cache.append(rows.data(), rows.data(), {}, n_tokens);
  std::vector<float> output(kDims);
  for (auto _ : state) {
    cache.attend({.data = rows.data(), .kernels = &kernels}, output.data());
    benchmark::DoNotOptimize(output.data());
  }
  state.counters["a token"] = benchmark::Counter(
      static_cast<double>(n_tokens),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void append(benchmark::State& state, const KVCacheConfig& config) {
  constexpr std::int64_t kTokens = 512;
  const std::vector<float> rows = normal(kTokens);
  const auto method = make_method(config);
  for (auto _ : state) {
    QuantizedKVCache cache(method);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      cache.append_key(rows.data() + t * kDims);
      cache.append_value(rows.data() + t * kDims);
    }
    benchmark::DoNotOptimize(cache.memory_bytes());
  }
  state.SetItemsProcessed(state.iterations() * kTokens);
}

void make(benchmark::State& state, const KVCacheConfig& config) {
  for (auto _ : state) benchmark::DoNotOptimize(make_method(config));
}

const bool registered = [] {
  for (const MethodInfo& info : methods()) {
    const KVCacheConfig config{.method = std::string(info.name)};
    for (const kernels::RowKernels& kernels : kernels::all_row_kernels()) {
      benchmark::RegisterBenchmark(
          (config.method + "/attend/" + std::string(kernels.target)).c_str(),
          [config, &kernels](benchmark::State& state) { attend(state, config, kernels); })
          ->Arg(512)
          ->Arg(4096)
          ->Unit(benchmark::kMicrosecond);
    }
    benchmark::RegisterBenchmark((config.method + "/append").c_str(), [config](
                                                                          benchmark::State& state) {
      append(state, config);
    })->Unit(benchmark::kMicrosecond);
    benchmark::RegisterBenchmark((config.method + "/make").c_str(), [config](
                                                                        benchmark::State& state) {
      make(state, config);
    })->Unit(benchmark::kMicrosecond);
  }
  return true;
}();

}  // namespace
}  // namespace kvpool::methods
