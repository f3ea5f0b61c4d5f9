#include "kvpool/core/block_pool_allocator.h"

#include <gmock/gmock.h>

#include "kvpool/base/error.h"

namespace kvpool::core {
namespace {

using testing::ElementsAre;

std::vector<std::uint32_t> ids(const std::vector<BlockHandle>& handles) {
  std::vector<std::uint32_t> result;
  for (const BlockHandle& handle : handles) result.push_back(value(handle.id));
  return result;
}

TEST(BlockPoolAllocator, hands_out_the_highest_ids_first_and_keys_before_values) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 5});
  EXPECT_THAT(ids(pool.allocate(Stream::kKey, 9, 1)), ElementsAre(2, 1, 0));
  EXPECT_THAT(ids(pool.allocate(Stream::kValue, 8, 1)), ElementsAre(4, 3));
  pool.check_invariants();
}

TEST(BlockPoolAllocator, free_all_stacks_blocks_in_allocation_order) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 5});
  const auto a = pool.allocate(Stream::kKey, 12, 1);
  EXPECT_EQ(pool.free_all(1), 3);
  pool.check_invariants();
  EXPECT_THAT(ids(pool.allocate(Stream::kKey, 12, 2)), ElementsAre(0, 1, 2));
  pool.free(a);
  EXPECT_EQ(pool.stats().blocks_in_use(), 3);
  pool.check_invariants();
}

TEST(BlockPoolAllocator, a_fork_shares_until_it_is_made_writable) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 8});
  const auto a = pool.allocate(Stream::kKey, 6, 1);
  const auto b = pool.fork(1, 2);
  EXPECT_EQ(ids(a), ids(b));
  EXPECT_EQ(pool.stats().n_allocations, 2);
  EXPECT_THROW(pool.mark_used(b[1], 3), InvalidArgument);
  BlockHandle mine;
  EXPECT_FALSE(pool.try_writable(b[1], mine));
  pool.check_invariants();
  EXPECT_NE(mine.id, b[1].id);
  pool.mark_used(mine, 3);
  pool.mark_used(a[1], 4);
  EXPECT_EQ(pool.free_all(1), 2);
  pool.check_invariants();
  EXPECT_EQ(pool.stats().blocks_in_use(), 2);
  EXPECT_EQ(pool.blocks_for(2), (std::vector<BlockHandle>{b[0], mine}));
  EXPECT_EQ(pool.free_all(2), 2);
  EXPECT_EQ(pool.n_free(Stream::kKey), 4);
  pool.check_invariants();
}

/// What a refused call says.
template <typename Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "not refused";
}

TEST(BlockPoolAllocator, refusals_name_the_call_the_argument_and_its_value) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 8, 1);
  EXPECT_EQ(refusal([&] { (void)pool.allocate(Stream::kKey, 0, 1); }),
            "[BlockPoolAllocator::allocate] n_tokens must be > 0, got 0");
  EXPECT_EQ(refusal([&] { (void)pool.allocate(Stream::kShared, 1, 1); }),
            "[BlockPoolAllocator::allocate] stream must be k or v in a pool with separate_kv, got "
            "kv");
  EXPECT_EQ(refusal([&] { (void)pool.allocate(Stream::kValue, 20, 1); }),
            "[BlockPoolAllocator::allocate] stream v needs 5 blocks, 4 free of 4");
  EXPECT_EQ(refusal([&] { pool.shrink(Stream::kKey, -1); }),
            "[BlockPoolAllocator::shrink] target_free must be >= 0, got -1");
  EXPECT_EQ(refusal([&] { pool.mark_used(blocks[0], 5); }),
            "[BlockPoolAllocator::mark_used] n_used must be between 0 and 4, got 5");
  EXPECT_EQ(refusal([&] { pool.register_owner(1); }),
            "[BlockPoolAllocator::register_owner] owner 1 is still active with 2 blocks");
  EXPECT_EQ(refusal([&] { pool.fork(2, 1); }),
            "[BlockPoolAllocator::fork] new_owner must hold no blocks, but 1 holds 2");
  EXPECT_EQ(refusal([&] { (void)pool.try_reserve(1, 0, -2); }),
            "[BlockPoolAllocator::reserve] n_value_blocks must be >= 0, got -2");
}

TEST(BlockPoolAllocator, refusals_of_handles_say_which_and_why) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 8, 1);
  BlockHandle made = blocks[1];
  made.serial = 77;
  EXPECT_EQ(refusal([&] { pool.free(std::vector{blocks[0], made}); }),
            "[BlockPoolAllocator::free] blocks[1] (id 2) with serial 77 was never handed out by "
            "this pool");
  made.pool = 0;
  EXPECT_EQ(refusal([&] { pool.free({&made, 1}); }),
            "[BlockPoolAllocator::free] block 2 of pool 0 is not a block of this pool, " +
                std::to_string(pool.pool_id()));
  pool.fork(1, 2);
  EXPECT_EQ(refusal([&] { pool.set_format(blocks[0], pool.intern_format("int8")); }),
            "[BlockPoolAllocator::set_format] block 3 has more than one reference: make it "
            "writable first");
  pool.free(blocks);
  EXPECT_EQ(refusal([&] { pool.mark_used(blocks, 1); }),
            "[BlockPoolAllocator::mark_used] blocks[0] (id 3) is stale: it was given back to the "
            "pool");
}

TEST(BlockPoolAllocator, blocks_of_both_streams_keep_their_order_through_copies) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 32});
  std::vector<BlockHandle> order;
  for (int i = 0; i < 6; ++i) {
    order.push_back(pool.allocate(i % 3 ? Stream::kKey : Stream::kValue, 1, 1)[0]);
  }
  EXPECT_EQ(pool.blocks_for(1), order);
  auto forked = pool.fork(1, 2);
  EXPECT_EQ(ids(forked), ids(order));
  for (std::size_t i : {4, 0, 3}) {
    const BlockHandle shared = forked[i];
    ASSERT_FALSE(pool.try_writable(shared, forked[i]));
    EXPECT_EQ(pool.blocks_for(2), forked);
  }
  forked.push_back(pool.allocate(Stream::kValue, 1, 2)[0]);
  EXPECT_EQ(pool.blocks_for(2), forked);
  EXPECT_EQ(ids(pool.fork(2, 3)), ids(forked));
  pool.check_invariants();
}

// A handle is stale for good, however often its block and its owner have come back since.
TEST(BlockPoolAllocator, a_handle_stays_stale_through_many_checkouts) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 1, .separate_kv = false});
  std::vector<BlockHandle> stale = pool.allocate(Stream::kShared, 4, 1);
  const auto forked = pool.fork(1, 2);
  stale.insert(stale.end(), forked.begin(), forked.end());
  pool.free(stale);
  for (int i = 0; i < 5; ++i) {
    const auto held = pool.allocate(Stream::kShared, 4, 1);
    ASSERT_EQ(held[0].id, stale[0].id);
    (void)pool.fork(1, 2);
    pool.free(stale);
    for (const BlockHandle& handle : stale) {
      EXPECT_FALSE(pool.info(handle));
      EXPECT_THROW(pool.mark_used(handle, 1), InvalidArgument);
    }
    EXPECT_EQ(pool.info(held[0])->n_references, 2);
    pool.free_all(1);
    pool.free_all(2);
  }
  EXPECT_EQ(pool.n_free(Stream::kShared), 1);
  pool.check_invariants();
}

TEST(BlockPoolAllocator, pools_have_ids_of_their_own) {
  BlockPoolAllocator a;
  BlockPoolAllocator b;
  EXPECT_NE(a.pool_id(), 0u);
  EXPECT_NE(a.pool_id(), b.pool_id());
}

}  // namespace
}  // namespace kvpool::core
