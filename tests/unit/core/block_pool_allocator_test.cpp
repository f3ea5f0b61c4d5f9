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

}  // namespace
}  // namespace kvpool::core
