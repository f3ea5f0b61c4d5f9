// A process that forks while other threads are inside the pool.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kvpool/core/block_pool_allocator.h"
#include "support/forked.h"

namespace kvpool::core {
namespace {

TEST(AllocatorOsFork, a_child_can_use_the_pools_it_inherits) {
  BlockPoolAllocator first({.block_size = 1, .n_blocks = 64});
  BlockPoolAllocator second({.block_size = 1, .n_blocks = 64});
  const auto kept = first.allocate(Stream::kKey, 3, 100);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (OwnerId owner : {1, 2, 3}) {
    threads.emplace_back([&, owner] {
      while (!stop) {
        for (BlockPoolAllocator* pool : {&first, &second}) {
          (void)pool->allocate(Stream::kValue, 4, owner);
          (void)pool->stats();
          pool->free_all(owner);
        }
      }
    });
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(kvpool::testing::holds_in_child([&] {
      first.check_invariants();
      second.check_invariants();
      const bool inherited = first.blocks_for(100) == kept;
      first.free(kept);
      BlockPoolAllocator own;
      return inherited && first.free_all(100) == 0 && own.allocate(Stream::kKey, 1, 1).size() == 1;
    }));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(first.blocks_for(100), kept);
}

}  // namespace
}  // namespace kvpool::core
