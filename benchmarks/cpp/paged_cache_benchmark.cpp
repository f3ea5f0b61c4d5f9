// What the books of paged caches cost beside the numbers: a token's append in 32 layers, a view for
// the kernel, a fork, and the slots that a trace's requests leave unused.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/paged_layer.h"
#include "kvpool/cache/paged_pool.h"

namespace kvpool::cache {
namespace {

constexpr int kLayers = 32;

/// A request of a model with 8 kv heads of 128 numbers in fp16. No page is ever written, so that
/// its memory is not there.
class Request {
 public:
  explicit Request(std::int64_t n_tokens, std::int64_t window = 0)
      : pool_(std::make_shared<PagedPool>(
            std::make_shared<core::BlockPoolAllocator>(core::PoolConfig{.n_blocks = 1 << 18}))),
        group_(std::make_shared<PagedGroup>(pool_, 1)) {
    PagedLayerSpec spec;
    spec.n_kv_heads = 8;
    spec.key_dim = spec.value_dim = 128;
    spec.window = window;
    for (int i = 0; i < kLayers; ++i) layers_.push_back(group_->add_layer(spec));
    append(n_tokens);
  }
  void append(std::int64_t n) {
    for (const auto& layer : layers_) benchmark::DoNotOptimize(layer->append(n));
  }
  PagedGroup& group() { return *group_; }
  std::vector<std::unique_ptr<PagedLayer>>& layers() { return layers_; }

 private:
  std::shared_ptr<PagedPool> pool_;
  std::shared_ptr<PagedGroup> group_;
  std::vector<std::unique_ptr<PagedLayer>> layers_;
};

void start_over(benchmark::State& state, std::unique_ptr<Request>& request, std::int64_t window) {
  state.PauseTiming();
  request.reset();
  request = std::make_unique<Request>(state.range(0), window);
  state.ResumeTiming();
}

/// Time of one layer's append of one token at range(0) tokens and more; range(1): with a view, and
/// the view of the step before it, alive, as where steps overlap.
void append_one_token(benchmark::State& state) {
  auto request = std::make_unique<Request>(state.range(0));
  std::vector<std::shared_ptr<const PageView>> views(kLayers);
  std::int64_t steps = 0;
  for (auto _ : state) {
    if (++steps % 1024 == 0) {
      views.assign(kLayers, nullptr);
      start_over(state, request, 0);
    }
    for (int i = 0; i < kLayers; ++i) {
      const auto& layer = request->layers()[static_cast<std::size_t>(i)];
      benchmark::DoNotOptimize(layer->append(1));
      if (state.range(1) == 1) views[static_cast<std::size_t>(i)] = layer->view();
      if (state.range(1) == 2) benchmark::DoNotOptimize(layer->view());
    }
  }
  state.counters["s/layer"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * kLayers,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(append_one_token)
    ->ArgNames({"tokens", "views"})
    ->ArgsProduct({{512, 4096, 32768}, {0, 1, 2}});

/// The same behind a window of 512, with views.
void append_one_token_behind_a_window(benchmark::State& state) {
  auto request = std::make_unique<Request>(state.range(0), 512);
  std::vector<std::shared_ptr<const PageView>> views(kLayers);
  for (auto _ : state) {
    for (int i = 0; i < kLayers; ++i) {
      const auto& layer = request->layers()[static_cast<std::size_t>(i)];
      benchmark::DoNotOptimize(layer->append(1));
      views[static_cast<std::size_t>(i)] = layer->view();
    }
  }
  state.counters["s/layer"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * kLayers,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(append_one_token_behind_a_window)->Arg(4096);

/// A copy of a sequence of range(0) tokens over 32 layers. No bytes are copied.
void fork_sequence(benchmark::State& state) {
  Request request(state.range(0));
  for (auto _ : state) {
    auto copies = request.group().fork();
    benchmark::DoNotOptimize(copies);
    state.PauseTiming();
    copies.clear();
    state.ResumeTiming();
  }
}
BENCHMARK(fork_sequence)->Arg(1000)->Arg(4096)->Unit(benchmark::kMicrosecond);

void drop_a_fork(benchmark::State& state) {
  Request request(state.range(0));
  for (auto _ : state) {
    state.PauseTiming();
    auto copies = request.group().fork();
    state.ResumeTiming();
    copies.clear();
  }
}
BENCHMARK(drop_a_fork)->Arg(1000)->Unit(benchmark::kMicrosecond);

/// Slots of blocks that hold no token when each request of a trace is done (context and generated
/// tokens), in percent of all. KVPOOL_TRACE names a CSV like Azure's: timestamp, context,
/// generated.
void unused_slots(benchmark::State& state) {
  const char* path = std::getenv("KVPOOL_TRACE");
  std::ifstream file(path == nullptr ? "" : path);
  std::string line;
  std::getline(file, line);
  std::vector<std::int64_t> lengths;
  while (std::getline(file, line)) {
    const auto comma = line.find(',');
    const auto second = line.find(',', comma + 1);
    if (comma == std::string::npos || second == std::string::npos) continue;
    lengths.push_back(std::stoll(line.substr(comma + 1)) + std::stoll(line.substr(second + 1)));
  }
  if (lengths.empty()) return state.SkipWithError("set KVPOOL_TRACE to a trace's CSV");
  PagedLayerSpec spec;
  spec.n_kv_heads = spec.key_dim = spec.value_dim = 1;
  std::int64_t unused = 0;
  std::int64_t slots = 0;
  for (auto _ : state) {
    unused = slots = 0;
    const std::int64_t size = state.range(0);
    const auto pool = std::make_shared<PagedPool>(std::make_shared<core::BlockPoolAllocator>(
        core::PoolConfig{.block_size = size, .n_blocks = 1 << 17, .separate_kv = false}));
    for (const std::int64_t n : lengths) {
      if (n == 0) continue;
      const auto layer = std::make_shared<PagedGroup>(pool, 1)->add_layer(spec);
      layer->append(n);
      unused += pool->blocks().stats().unused_slots();
      slots += layer->n_blocks() * size;
    }
  }
  state.counters["unused %"] = 100.0 * static_cast<double>(unused) / static_cast<double>(slots);
}
BENCHMARK(unused_slots)->Arg(16)->Arg(256)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvpool::cache
