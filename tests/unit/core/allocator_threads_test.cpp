// Calls from many threads at once; most telling under ThreadSanitizer.
#include <gmock/gmock.h>

#include <atomic>
#include <memory>
#include <thread>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::core {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 2'000;
#else
constexpr int kRounds = 20'000;
#endif
constexpr int kThreads = 8;

template <typename Body>
void in_threads(int n, Body&& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < n; ++t) threads.emplace_back([&body, t] { body(t); });
  for (std::thread& thread : threads) thread.join();
}

TEST(AllocatorThreads, field_I7_no_block_is_handed_out_twice) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 64, .separate_kv = false});
  std::array<std::atomic<bool>, 64> taken{};
  std::atomic<int> twice = 0;
  in_threads(kThreads, [&](int t) {
    std::array<BlockHandle, 4> out;
    for (int i = 0; i < 5 * kRounds; ++i) {
      const std::span<BlockHandle> mine(out.data(), 1 + (t + i) % 4);
      if (pool.try_allocate(Stream::kShared, std::ssize(mine), t, {}, mine)) continue;
      for (const BlockHandle& block : mine) twice += taken[value(block.id)].exchange(true);
      for (const BlockHandle& block : mine) taken[value(block.id)] = false;
      if (i % 2) {
        pool.free(mine);
      } else {
        pool.free_all(t);
      }
    }
  });
  EXPECT_EQ(twice, 0);
  EXPECT_EQ(pool.n_free(Stream::kShared), 64);
  EXPECT_EQ(pool.stats().blocks_in_use(), 0);
  pool.check_invariants();
}

TEST(AllocatorThreads, a_block_goes_back_once_however_many_free_it) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 16, .separate_kv = false});
  for (int round = 0; round < 200; ++round) {
    const auto blocks = pool.allocate(Stream::kShared, 8, 1);
    const auto shared = pool.fork(1, 2);
    in_threads(4, [&](int t) {
      switch (t) {
        case 0:
          pool.free(blocks);
          break;
        case 1:
          pool.free_all(1);
          break;
        case 2:
          pool.free(shared);
          break;
        case 3:
          pool.free_all(2);
          break;
      }
    });
    ASSERT_EQ(pool.n_free(Stream::kShared), 16);
    ASSERT_EQ(pool.stats().n_frees, 8 * (round + 1));
  }
  pool.check_invariants();
}

TEST(AllocatorThreads, forks_race_with_writes_and_frees_of_their_source) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 256, .separate_kv = false});
  in_threads(kThreads, [&](int t) {
    const OwnerId source = t / 2;  // two threads use each source
    const OwnerId copy = pool.new_owner();
    for (int i = 0; i < kRounds / 10; ++i) {
      std::array<BlockHandle, 3> out;
      (void)pool.try_allocate(Stream::kShared, 9, source, {}, out);
      for (const BlockHandle& shared : pool.fork(source, copy)) {
        BlockHandle mine;
        if (!pool.try_writable(shared, mine)) pool.mark_used(mine, i % 5);
      }
      pool.free_all(i % 2 ? copy : source);
      pool.free_all(i % 2 ? source : copy);
    }
  });
  pool.check_invariants();
}

TEST(AllocatorThreads, fault_F14_readers_never_see_half_an_operation) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 64});
  std::atomic<bool> stop = false;
  std::thread reader([&] {
    const auto check = [](const AllocationStats& stats) {
      // Each allocation is of 4 blocks, one with 3 unused slots; each is freed whole.
      ASSERT_EQ(stats.blocks_in_use() % 4, 0);
      ASSERT_EQ(stats.fragmented_count * 4, stats.blocks_in_use());
      ASSERT_EQ(stats.unused_slots(), 3 * stats.fragmented_count);
      ASSERT_GE(stats.peak_blocks_in_use, stats.blocks_in_use());
    };
    while (!stop) {
      check(pool.stats());
      for (const AllocationStats& stats : pool.history()) check(stats);
    }
  });
  in_threads(4, [&](int t) {
    std::array<BlockHandle, 4> out;
    for (int i = 0; i < kRounds / 4; ++i) {
      if (pool.try_allocate(Stream(t % 2), 13, t, {}, out)) continue;
      pool.free_all(t);
    }
  });
  stop = true;
  reader.join();
}

TEST(AllocatorThreads, observers_hear_of_each_block_once_and_may_come_and_go) {
  struct Counter : PoolObserver {
    void blocks_freed(std::span<const Event> events) noexcept override {
      n_freed += static_cast<std::int64_t>(events.size());
    }
    void blocks_retired(std::span<const Event> events) noexcept override {
      n_retired += static_cast<std::int64_t>(events.size());
    }
    std::atomic<std::int64_t> n_freed = 0;
    std::atomic<std::int64_t> n_retired = 0;
  };
  BlockPoolAllocator pool(
      {.block_size = 1, .n_blocks = 32, .separate_kv = false, .grow_on_exhaustion = true});
  const auto counter = std::make_shared<Counter>();
  pool.add_observer(counter);
  in_threads(kThreads, [&](int t) {
    for (int i = 0; i < kRounds / 20; ++i) {
      (void)pool.allocate(Stream::kShared, 6, t);
      const auto visitor = std::make_shared<Counter>();
      if (i % 16 == 0) pool.add_observer(visitor);
      if (i % 8 == 0) pool.shrink(Stream::kShared, 4);
      pool.free_all(t);
    }
  });
  EXPECT_EQ(counter->n_freed, pool.stats().n_frees);
  EXPECT_EQ(counter->n_retired, pool.stats().n_retired);
  pool.check_invariants();
}

}  // namespace
}  // namespace kvpool::core
