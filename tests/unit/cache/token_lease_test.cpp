#include "kvpool/cache/token_lease.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {
namespace {

using core::BlockPoolAllocator;
using core::PoolConfig;
using core::Stream;

std::shared_ptr<BlockPoolAllocator> make_pool(std::int64_t n_blocks, std::int64_t block_size = 16) {
  return std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = block_size, .n_blocks = n_blocks});
}

TEST(TokenLease, charges_keys_and_values_of_every_sequence) {
  const auto pool = make_pool(64);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(3, 17));
  EXPECT_EQ(lease.n_blocks(), 3 * 2 * 2);
  EXPECT_EQ(pool->blocks_for(7).size(), 12u);
  EXPECT_EQ(pool->n_free(Stream::kKey), 32 - 6);
  EXPECT_EQ(pool->n_free(Stream::kValue), 32 - 6);
}

TEST(TokenLease, fault_F33_fill_of_the_blocks_follows_the_tokens) {
  const auto pool = make_pool(64);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(1, 256));
  lease.set_used(1);
  lease.check_invariants();
  EXPECT_EQ(pool->stats().unused_slots(), 2 * 255);
  lease.set_used(40);
  lease.check_invariants();
  EXPECT_EQ(pool->stats().fragmented_count, 2);
  lease.set_used(15);
  lease.check_invariants();
  EXPECT_EQ(pool->stats().unused_slots(), 2 * (256 - 15));
}

TEST(TokenLease, padding_is_held_but_unused) {
  const auto pool = make_pool(64, 4);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(2, 12));
  lease.set_used(10);
  lease.set_padding(0, {0, 5});
  lease.check_invariants();
  EXPECT_EQ(pool->stats().unused_slots(), 2 * (2 + 2 + 5));
  lease.set_used(12);
  lease.set_padding(3, {0, 5});  // rows 3..7 of the second sequence
  lease.check_invariants();
  EXPECT_EQ(pool->stats().unused_slots(), 2 * 5);
  ASSERT_FALSE(lease.try_resize(1, 12));
  lease.check_invariants();
  EXPECT_EQ(pool->stats().unused_slots(), 0);
  EXPECT_THROW(lease.set_padding(0, {1, 2}), InvalidArgument);
}

TEST(TokenLease, running_out_changes_nothing) {
  const auto pool = make_pool(8);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(1, 32));
  lease.set_used(20);
  ASSERT_TRUE(lease.try_resize(1, 100));
  EXPECT_EQ(lease.rows(), 32);
  EXPECT_EQ(lease.used(), 20);
  EXPECT_EQ(pool->stats().blocks_in_use(), 4);
  lease.check_invariants();
}

TEST(TokenLease, shrinking_gives_blocks_back) {
  const auto pool = make_pool(32);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(2, 64));
  lease.set_used(64);
  ASSERT_FALSE(lease.try_resize(2, 20));
  EXPECT_EQ(lease.used(), 20);
  EXPECT_EQ(pool->stats().blocks_in_use(), 8);
  lease.check_invariants();
  pool->check_invariants();
}

TEST(TokenLease, fault_F28_gives_back_its_own_blocks_only) {
  const auto pool = make_pool(32);
  TokenLease kept(pool, -1);
  ASSERT_FALSE(kept.try_resize(1, 32));
  {
    TokenLease dropped(pool, -1);
    ASSERT_FALSE(dropped.try_resize(1, 48));
  }
  EXPECT_EQ(pool->stats().blocks_in_use(), kept.n_blocks());
  kept.set_used(32);
  kept.check_invariants();
}

TEST(TokenLease, a_lease_that_lost_its_blocks_says_so_and_frees_nothing_of_others) {
  const auto pool = make_pool(8);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(1, 32));
  lease.set_used(3);
  pool->free_all(7);
  const auto others = pool->allocate(Stream::kKey, 64, 8);
  EXPECT_THROW(lease.set_used(4), LeaseLost);
  EXPECT_THROW((void)lease.try_resize(1, 48), LeaseLost);
  EXPECT_THROW(lease.verify(), LeaseLost);
  lease.release();
  EXPECT_EQ(pool->blocks_for(8).size(), others.size());
  ASSERT_FALSE(lease.try_resize(1, 0));
}

TEST(TokenLease, without_a_pool_nothing_is_charged) {
  TokenLease lease(nullptr, 0);
  ASSERT_FALSE(lease.try_resize(2, 100));
  lease.set_used(50);
  EXPECT_EQ(lease.n_blocks(), 0);
  EXPECT_EQ(lease.used(), 50);
  lease.check_invariants();
}

TEST(TokenLease, formats_reach_blocks_held_and_blocks_to_come) {
  const auto pool = make_pool(8);
  TokenLease lease(pool, 7);
  ASSERT_FALSE(lease.try_resize(1, 16));
  lease.set_formats(pool->intern_format("bf16"), pool->intern_format("fp32"));
  ASSERT_FALSE(lease.try_resize(1, 32));
  for (const auto& block : pool->blocks_for(7)) {
    EXPECT_EQ(pool->format_name(pool->info(block)->format),
              block.stream == Stream::kKey ? "bf16" : "fp32");
  }
}

TEST(TokenLease, leases_may_be_dropped_in_any_thread) {
  const auto pool = make_pool(1024);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        TokenLease lease(pool, -1);
        ASSERT_FALSE(lease.try_resize(1, 64));
        lease.set_used(i % 64);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(pool->stats().blocks_in_use(), 0);
  pool->check_invariants();
}

RC_GTEST_PROP(TokenLease, holds_what_the_numbers_say_after_any_calls, ()) {
  const auto block_size = *rc::gen::inRange<std::int64_t>(1, 20);
  const auto pool = make_pool(*rc::gen::inRange<std::int64_t>(1, 60), block_size);
  TokenLease lease(pool, 3);
  const auto n_calls = *rc::gen::inRange(1, 30);
  for (int i = 0; i < n_calls; ++i) {
    const std::int64_t before = pool->stats().blocks_in_use();
    if (*rc::gen::arbitrary<bool>()) {
      const auto batch = *rc::gen::inRange<std::int64_t>(1, 4);
      const auto rows = *rc::gen::inRange<std::int64_t>(0, 100);
      if (lease.try_resize(batch, rows)) {
        RC_ASSERT(pool->stats().blocks_in_use() == before);
      } else {
        const std::int64_t blocks = (rows + block_size - 1) / block_size;
        RC_ASSERT(pool->stats().blocks_in_use() == 2 * batch * blocks);
      }
    } else {
      lease.set_used(*rc::gen::inRange<std::int64_t>(0, lease.rows() + 1));
    }
    lease.check_invariants();
    pool->check_invariants();
  }
  lease.release();
  RC_ASSERT(pool->stats().blocks_in_use() == 0);
}

}  // namespace
}  // namespace kvpool::cache
