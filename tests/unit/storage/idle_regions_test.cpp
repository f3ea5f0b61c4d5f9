#include "kvpool/storage/idle_regions.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvpool::storage {
namespace {

TEST(IdleRegions, a_region_is_taken_again_by_size_and_stream) {
  std::vector<std::uint64_t> freed;
  IdleRegions idle(1000, [&](std::uint64_t address, std::size_t) { freed.push_back(address); });
  idle.put(100, 1, 0x10);
  idle.put(100, 1, 0x20);
  idle.put(100, 2, 0x30);
  EXPECT_EQ(idle.take(101, 1), 0u);
  EXPECT_EQ(idle.take(100, 3), 0u);
  EXPECT_EQ(idle.take(100, 1), 0x20u);
  EXPECT_EQ(idle.take(100, 1), 0x10u);
  EXPECT_EQ(idle.take(100, 1), 0u);
  EXPECT_EQ(idle.take(100, 2), 0x30u);
  EXPECT_EQ(idle.bytes(), 0u);
  EXPECT_TRUE(freed.empty());
  idle.check_invariants();
}

TEST(IdleRegions, past_the_limit_the_oldest_go_down_to_half_of_it) {
  std::vector<std::uint64_t> freed;
  IdleRegions idle(100, [&](std::uint64_t address, std::size_t) { freed.push_back(address); });
  for (std::uint64_t address = 1; address <= 5; ++address) idle.put(20, 0, address);
  EXPECT_TRUE(freed.empty());
  idle.put(10, 0, 6);
  EXPECT_EQ(freed, (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_EQ(idle.bytes(), 50u);
  idle.check_invariants();
  idle.shrink(0);
  EXPECT_EQ(freed, (std::vector<std::uint64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(idle.take(20, 0), 0u);
}

TEST(IdleRegions, a_region_larger_than_the_limit_is_freed_at_once) {
  std::vector<std::uint64_t> freed;
  IdleRegions idle(100, [&](std::uint64_t address, std::size_t) { freed.push_back(address); });
  idle.put(101, 0, 7);
  EXPECT_EQ(freed, (std::vector<std::uint64_t>{7}));
  EXPECT_EQ(idle.bytes(), 0u);
}

TEST(IdleRegions, nobody_gets_a_region_that_another_thread_has) {
  std::atomic<int> n_freed{0};  // at most four of each stream are out at once: all fit
  IdleRegions idle(64, [&](std::uint64_t, std::size_t size) { n_freed += size == 8; });
  std::atomic<std::uint64_t> next{1};
  std::vector<std::atomic<bool>> in_use(4 * 500 + 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        std::uint64_t address = idle.take(8, i % 2);
        if (address == 0) address = next++;
        EXPECT_FALSE(in_use[address].exchange(true));
        in_use[address] = false;
        idle.put(8, i % 2, address);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  idle.check_invariants();
  EXPECT_EQ(n_freed, 0);
}

TEST(IdleRegions, what_is_freed_is_named_with_its_size) {
  std::size_t n_bytes = 0;
  IdleRegions idle(100, [&](std::uint64_t, std::size_t size) { n_bytes += size; });
  idle.put(30, 0, 1);
  idle.put(40, 0, 2);
  idle.shrink(0);
  EXPECT_EQ(n_bytes, 70u);
}

}  // namespace
}  // namespace kvpool::storage
