// What the allocator's calls cost: one block, whole requests of 16,384 blocks, a token's books, and
// threads that compete for one pool. Statistics and history are always on.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <random>
#include <vector>

#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::core {
namespace {

void allocate_and_free_one_block(benchmark::State& state) {
  BlockPoolAllocator pool({.n_blocks = 1024});
  std::array<BlockHandle, 1> block;
  for (auto _ : state) {
    if (pool.try_allocate(Stream::kKey, 16, 1, {}, block)) state.SkipWithError("exhausted");
    pool.free(block);
  }
}
BENCHMARK(allocate_and_free_one_block);

void allocate_and_free_all_of_one_block(benchmark::State& state) {
  BlockPoolAllocator pool({.n_blocks = 1024});
  std::array<BlockHandle, 1> block;
  for (auto _ : state) {
    if (pool.try_allocate(Stream::kKey, 16, 1, {}, block)) state.SkipWithError("exhausted");
    pool.free_all(1);
  }
}
BENCHMARK(allocate_and_free_all_of_one_block);

/// Each thread allocates and frees for an owner of its own; items are pairs over all threads.
void competing_pairs(benchmark::State& state) {
  static std::unique_ptr<BlockPoolAllocator> pool;
  if (state.thread_index() == 0) pool = std::make_unique<BlockPoolAllocator>(PoolConfig{});
  std::array<BlockHandle, 1> block;
  const OwnerId owner = state.thread_index();
  for (auto _ : state) {
    if (pool->try_allocate(Stream::kKey, 16, owner, {}, block)) state.SkipWithError("exhausted");
    pool->free_all(owner);
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(competing_pairs)->Threads(1)->Threads(2)->Threads(8)->UseRealTime();

/// A request of range(0) blocks; only the named half of each round is timed.
class Request {
 public:
  explicit Request(std::int64_t n)
      : pool_({.n_blocks = n, .separate_kv = false}), blocks_(static_cast<std::size_t>(n)) {}

  void allocate() {
    benchmark::DoNotOptimize(
        pool_.try_allocate(Stream::kShared, 16 * std::ssize(blocks_), 1, {}, blocks_));
  }
  BlockPoolAllocator& pool() { return pool_; }
  std::vector<BlockHandle>& blocks() { return blocks_; }

 private:
  BlockPoolAllocator pool_;
  std::vector<BlockHandle> blocks_;
};

void allocate_request(benchmark::State& state) {
  Request request(state.range(0));
  for (auto _ : state) {
    request.allocate();
    state.PauseTiming();
    request.pool().free_all(1);
    state.ResumeTiming();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(allocate_request)->Arg(8192)->Arg(16384);

void free_all_of_request(benchmark::State& state) {
  Request request(state.range(0));
  for (auto _ : state) {
    state.PauseTiming();
    request.allocate();
    state.ResumeTiming();
    request.pool().free_all(1);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(free_all_of_request)->Arg(8192)->Arg(16384);

enum Order { kInOrder, kReversed, kShuffled };

template <Order order>
void free_request(benchmark::State& state) {
  Request request(state.range(0));
  for (auto _ : state) {
    state.PauseTiming();
    request.allocate();
    if (order == kReversed) std::reverse(request.blocks().begin(), request.blocks().end());
    if (order == kShuffled) {
      std::shuffle(request.blocks().begin(), request.blocks().end(), std::mt19937(1));
    }
    state.ResumeTiming();
    request.pool().free(request.blocks());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(free_request<kInOrder>)->Arg(8192)->Arg(16384);
BENCHMARK(free_request<kReversed>)->Arg(8192)->Arg(16384);
BENCHMARK(free_request<kShuffled>)->Arg(8192)->Arg(16384);

/// The books of one token through 28 layers, keys and values: a block each 16 tokens and the fill
/// of the tail blocks, by calls for all layers at once. Time is per token.
void bookkeeping_of_a_token(benchmark::State& state) {
  constexpr std::int64_t kLayers = 28;
  constexpr std::int64_t kBlockSize = 16;
  constexpr std::int64_t kTokens = 4096;
  BlockPoolAllocator pool(
      {.block_size = kBlockSize, .n_blocks = 2 * kLayers * kTokens / kBlockSize});
  std::array<BlockHandle, 2 * kLayers> tails;
  std::int64_t offset = 0;
  for (auto _ : state) {
    const std::int64_t row = offset % kBlockSize;
    if (row == 0) {
      const std::span all(tails);
      if (pool.try_allocate_kv(1, 1, {}, {}, all.first(kLayers), all.last(kLayers), kLayers)) {
        state.SkipWithError("exhausted");
      }
    } else {
      pool.mark_used(tails, row + 1);
    }
    if (++offset == kTokens) {
      pool.free_all(1);
      offset = 0;
    }
  }
}
BENCHMARK(bookkeeping_of_a_token);

void mark_used_of_56_blocks(benchmark::State& state) {
  BlockPoolAllocator pool({.n_blocks = 112});
  std::array<BlockHandle, 56> blocks;
  if (pool.try_allocate(Stream::kKey, 1, 1, {}, blocks, 56)) state.SkipWithError("exhausted");
  std::int64_t n_used = 0;
  for (auto _ : state) pool.mark_used(blocks, 1 + (n_used++ & 15));
  state.SetItemsProcessed(state.iterations() * 56);
}
BENCHMARK(mark_used_of_56_blocks);

void fork_and_free_all(benchmark::State& state) {
  Request request(state.range(0));
  request.allocate();
  for (auto _ : state) {
    benchmark::DoNotOptimize(request.pool().fork(1, 2));
    request.pool().free_all(2);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(fork_and_free_all)->Arg(16384);

/// Resident bytes of this process.
double resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  double total = 0;
  double resident = 0;
  statm >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

/// Process memory that a block costs once each has been in use: all at the start, or grown one by
/// one. The time is of no interest.
void memory_of_a_block(benchmark::State& state) {
  constexpr std::int64_t kBlocks = 4'000'000;
  const bool grown = state.range(0);
  double bytes = 0;
  for (auto _ : state) {
    const double before = resident_bytes();
    BlockPoolAllocator pool(
        {.n_blocks = grown ? 1 : kBlocks, .separate_kv = false, .grow_on_exhaustion = grown});
    std::array<BlockHandle, 1> block;
    for (std::int64_t i = 0; i < kBlocks; ++i) {
      if (pool.try_allocate(Stream::kShared, 16, i % 1000, {}, block)) {
        state.SkipWithError("exhausted");
      }
    }
    bytes = resident_bytes() - before;
  }
  state.counters["bytes_per_block"] = bytes / static_cast<double>(kBlocks);
}
BENCHMARK(memory_of_a_block)->ArgName("grown")->Arg(0)->Arg(1)->Iterations(1);

}  // namespace
}  // namespace kvpool::core
