#include "kvpool/cache/stream_lease.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {
namespace {

using core::BlockPoolAllocator;
using core::Stream;
using testing::ElementsAre;

class StreamLeaseTest : public testing::Test {
 protected:
  std::vector<std::int64_t> fills(OwnerId owner = 7) const {
    std::vector<std::int64_t> out;
    for (const auto& block : pool->blocks_for(owner)) out.push_back(pool->info(block)->n_used);
    return out;
  }
  void resize(StreamLease& lease, std::int64_t keys, std::int64_t values) {
    EXPECT_EQ(lease.try_resize(keys, values), std::nullopt);
    lease.check_invariants();
    pool->check_invariants();
  }

  std::shared_ptr<BlockPoolAllocator> pool =
      std::make_shared<BlockPoolAllocator>(core::PoolConfig{.block_size = 4, .n_blocks = 8});
};

TEST_F(StreamLeaseTest, keys_and_values_are_counted_apart) {
  StreamLease lease(pool, 7, {});
  resize(lease, 1, 0);
  EXPECT_EQ(lease.n_blocks(), 1);
  resize(lease, 1, 1);
  EXPECT_EQ(lease.n_blocks(), 2);
  resize(lease, 6, 5);
  EXPECT_THAT(fills(), ElementsAre(4, 4, 2, 1));
  resize(lease, 3, 0);
  EXPECT_THAT(fills(), ElementsAre(3));
}

TEST_F(StreamLeaseTest, a_shortage_of_either_stream_changes_nothing) {
  StreamLease lease(pool, 7, {});
  const auto others = pool->allocate(Stream::kValue, 16, 1);
  const core::AllocationStats before = pool->stats();
  EXPECT_TRUE(lease.try_resize(1, 1).has_value());
  EXPECT_EQ(lease.n_blocks(), 0);
  EXPECT_EQ(pool->n_free(Stream::kKey), 4);
  EXPECT_EQ(pool->stats().n_allocations, before.n_allocations);
  resize(lease, 1, 0);
  EXPECT_TRUE(lease.try_resize(9, 1).has_value());  // two key blocks are there, the value's is not
  EXPECT_THAT(fills(), ElementsAre(1));
  lease.check_invariants();
}

TEST_F(StreamLeaseTest, fault_F28_it_gives_back_its_own_blocks_only) {
  auto first = std::make_unique<StreamLease>(pool, -1, core::FormatTag{});
  StreamLease second(pool, -1, {});
  resize(*first, 4, 4);
  resize(second, 4, 4);
  first.reset();
  EXPECT_EQ(pool->blocks_for(-1).size(), 2u);
  resize(second, 5, 5);
}

TEST_F(StreamLeaseTest, blocks_freed_behind_it_are_noticed) {
  StreamLease lease(pool, 7, {});
  resize(lease, 4, 4);
  pool->free_all(7);
  EXPECT_THROW((void)lease.try_resize(4, 4), LeaseLost);
  EXPECT_THROW((void)lease.try_resize(5, 5), LeaseLost);
  EXPECT_THROW((void)lease.try_resize(0, 0), LeaseLost);
  EXPECT_THROW(lease.verify(), LeaseLost);
  lease.release();
  lease.verify();
  resize(lease, 1, 1);
  EXPECT_EQ(pool->stats().blocks_in_use(), 2);
}

TEST_F(StreamLeaseTest, negative_numbers_are_refused) {
  StreamLease lease(pool, 7, {});
  EXPECT_THROW((void)lease.try_resize(-1, 0), InvalidArgument);
  EXPECT_THROW((void)lease.try_resize(0, -1), InvalidArgument);
}

TEST_F(StreamLeaseTest, any_course_of_lengths_ends_in_the_same_books) {
  for (const bool separate : {true, false}) {
    pool = std::make_shared<BlockPoolAllocator>(
        core::PoolConfig{.block_size = 3, .n_blocks = 12, .separate_kv = separate});
    StreamLease lease(pool, 7, {});
    std::mt19937 random(5);
    for (int step = 0; step < 500; ++step) {
      const auto keys = static_cast<std::int64_t>(random() % 24);
      const auto values = static_cast<std::int64_t>(random() % 24);
      const std::int64_t old_keys = lease.n_keys();
      const std::int64_t old_values = lease.n_values();
      if (lease.try_resize(keys, values)) {
        EXPECT_EQ(lease.n_keys(), old_keys);
        EXPECT_EQ(lease.n_values(), old_values);
      } else {
        EXPECT_EQ(lease.n_keys(), keys);
        EXPECT_EQ(lease.n_values(), values);
      }
      lease.check_invariants();
      pool->check_invariants();
      ASSERT_EQ(pool->stats().blocks_in_use(), lease.n_blocks());
    }
    lease.release();
    EXPECT_EQ(pool->stats().blocks_in_use(), 0);
  }
}

TEST(StreamLease, needs_a_pool) { EXPECT_THROW(StreamLease(nullptr, 1, {}), InvalidArgument); }

}  // namespace
}  // namespace kvpool::cache
