// Faults that another allocator of this interface has; each test is named after its id.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::core {
namespace {

using testing::SizeIs;

/// A call that must be refused and must leave the pool as it was.
template <typename Call>
void expect_refused(const BlockPoolAllocator& pool, Call&& call) {
  const AllocationStats before = pool.stats();
  EXPECT_THROW(call(), InvalidArgument);
  EXPECT_EQ(pool.stats(), before);
  pool.check_invariants();
}

TEST(AllocatorFaults, fault_F01_a_stale_handle_cannot_touch_the_next_owners_block) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 2});
  const auto stale = pool.allocate(Stream::kKey, 4, 1);
  pool.free(stale);
  const auto mine = pool.allocate(Stream::kKey, 4, 2);
  ASSERT_EQ(mine[0].id, stale[0].id);
  pool.free(stale);
  EXPECT_EQ(pool.blocks_for(2), mine);
  expect_refused(pool, [&] { pool.mark_used(stale[0], 1); });
  EXPECT_EQ(pool.info(mine[0])->n_used, 4);
}

TEST(AllocatorFaults, fault_F02_a_block_of_another_pool_is_refused) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  BlockPoolAllocator other({.block_size = 4, .n_blocks = 4});
  const auto mine = pool.allocate(Stream::kKey, 4, 1);
  const auto foreign = other.allocate(Stream::kKey, 4, 1);
  ASSERT_EQ(mine[0].id, foreign[0].id);
  expect_refused(pool, [&] { pool.free(foreign); });
  expect_refused(pool, [&] { pool.free(std::vector{mine[0], foreign[0]}); });
  expect_refused(pool, [&] { pool.mark_used(foreign[0], 1); });
  expect_refused(pool, [&] { (void)pool.info(foreign[0]); });
  EXPECT_EQ(other.blocks_for(1), foreign);
  EXPECT_EQ(pool.blocks_for(1), mine);
}

TEST(AllocatorFaults, fault_F03_a_copy_of_a_handle_frees_its_block_once) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  const auto blocks = pool.allocate(Stream::kKey, 4, 1);
  const BlockHandle copy = blocks[0];
  pool.free({&copy, 1});
  pool.free(blocks);
  EXPECT_EQ(pool.stats().n_frees, 1);
  EXPECT_EQ(pool.n_free(Stream::kKey), 2);
  const auto next = pool.allocate(Stream::kKey, 8, 2);
  EXPECT_NE(next[0].id, next[1].id);
  pool.check_invariants();
}

TEST(AllocatorFaults, fault_F04_a_hand_made_handle_is_refused_before_anything_changes) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  const auto blocks = pool.allocate(Stream::kKey, 8, 1);
  std::vector<BlockHandle> made(7, blocks[1]);
  made[0] = BlockHandle{};
  made[1].id = BlockId{99};
  made[2].record = 99;
  made[3].serial = 99;
  made[4].serial = 0;
  made[5].reference = 1;
  made[6].stream = Stream::kValue;
  for (const BlockHandle& handle : made) {
    expect_refused(pool, [&] { pool.free(std::vector{blocks[0], handle}); });
    expect_refused(pool, [&] { pool.mark_used(handle, 1); });
  }
  EXPECT_EQ(pool.blocks_for(1), blocks);
}

TEST(AllocatorFaults, fault_F04_handles_swapped_field_by_field_are_refused) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  const auto blocks = pool.allocate(Stream::kKey, 8, 1);
  BlockHandle mixed = blocks[0];
  mixed.serial = blocks[1].serial;
  expect_refused(pool, [&] { pool.free({&mixed, 1}); });
  const auto forked = pool.fork(1, 2);
  mixed = forked[0];
  mixed.record = forked[1].record;
  expect_refused(pool, [&] { pool.free({&mixed, 1}); });
  mixed.id = forked[1].id;
  expect_refused(pool, [&] { pool.free({&mixed, 1}); });
}

TEST(AllocatorFaults, fault_F05_every_64_bit_owner_keeps_its_blocks_findable) {
  // No owner value means "free": that is a state of the block, not an owner.
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 16});
  for (OwnerId owner : {OwnerId{0}, OwnerId{-1}, std::numeric_limits<OwnerId>::max()}) {
    const auto blocks = pool.allocate(Stream::kKey, 4, owner);
    EXPECT_EQ(pool.blocks_for(owner), blocks);
    EXPECT_EQ(pool.free_all(owner), 1);
  }
  EXPECT_EQ(pool.stats().blocks_in_use(), 0);
}

TEST(AllocatorFaults, fault_F07_growth_that_cannot_do_changes_nothing) {
  BlockPoolAllocator pool(
      {.block_size = 4, .n_blocks = 4, .grow_on_exhaustion = true, .max_blocks = 6});
  EXPECT_THROW((void)pool.allocate(Stream::kKey, 20, 1), BlockPoolExhausted);
  EXPECT_EQ(pool.stats().n_grown, 0);
  EXPECT_EQ(pool.stats().n_blocks, 4);
  EXPECT_EQ(pool.n_free(Stream::kKey), 2);
  std::vector<BlockHandle> keys(4), values(4);  // either stream alone would fit
  const auto shortage = pool.try_allocate_kv(16, 1, {}, {}, keys, values);
  ASSERT_TRUE(shortage);
  EXPECT_EQ(shortage->stream, Stream::kValue);
  EXPECT_EQ(pool.stats().n_grown, 0);
  EXPECT_THAT(pool.allocate(Stream::kKey, 16, 1), SizeIs(4));
  EXPECT_EQ(pool.stats().n_grown, 2);
}

TEST(AllocatorFaults, fault_F08_mark_used_takes_only_what_a_block_can_hold) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  const auto blocks = pool.allocate(Stream::kKey, 8, 1);
  for (std::int64_t bad : {std::int64_t{5}, std::int64_t{-1}, std::int64_t{1} << 33}) {
    expect_refused(pool, [&] { pool.mark_used(blocks[0], bad); });
    expect_refused(pool, [&] { pool.mark_used(blocks, bad); });
  }
  pool.free({&blocks[1], 1});
  expect_refused(pool, [&] { pool.mark_used(blocks, 1); });  // the second is not checked out
  EXPECT_EQ(pool.info(blocks[0])->n_used, 4);
}

TEST(AllocatorFaults, fault_F14_snapshots_and_history_are_whole_copies) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  const AllocationStats before = pool.stats();
  const auto history = pool.history();
  (void)pool.allocate(Stream::kKey, 4, 1);
  EXPECT_EQ(before.n_allocations, 0);
  EXPECT_THAT(history, SizeIs(0));
}

TEST(AllocatorFaults, fault_F15_freeing_in_any_order_costs_the_same_per_block) {
  // With work that grows with the list, half a million blocks would outlast the test's time limit.
  constexpr std::int64_t kBlocks = 500'000;
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = kBlocks, .separate_kv = false});
  for (bool reversed : {false, true}) {
    auto blocks = pool.allocate(Stream::kShared, kBlocks, 1);
    if (reversed) std::reverse(blocks.begin(), blocks.end());
    for (const BlockHandle& block : blocks) pool.free({&block, 1});
    EXPECT_EQ(pool.n_free(Stream::kShared), kBlocks);
  }
}

TEST(AllocatorFaults, fault_F16_a_registration_outlives_the_last_block) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 4});
  pool.register_owner(1);
  const auto blocks = pool.allocate(Stream::kKey, 4, 1);
  EXPECT_THROW(pool.release_owner(1), InvalidArgument);
  pool.free(blocks);
  EXPECT_THROW(pool.register_owner(1), OwnerAlreadyActive);
  pool.free_all(1);
  EXPECT_NO_THROW(pool.register_owner(1));
}

TEST(AllocatorFaults, fault_F17_observers_learn_which_ids_are_retired) {
  struct Bytes : PoolObserver {  // what a storage would keep by id
    void blocks_freed(std::span<const Event>) noexcept override {}
    void blocks_retired(std::span<const Event> events) noexcept override {
      for (const Event& event : events) ids.erase(value(event.id));
    }
    std::set<std::uint32_t> ids;
  };
  BlockPoolAllocator pool(
      {.block_size = 4, .n_blocks = 4, .separate_kv = false, .grow_on_exhaustion = true});
  const auto bytes = std::make_shared<Bytes>();
  pool.add_observer(bytes);
  for (int cycle = 0; cycle < 100; ++cycle) {
    for (const BlockHandle& block : pool.allocate(Stream::kShared, 40, 1)) {
      bytes->ids.insert(value(block.id));
    }
    pool.free_all(1);
    pool.shrink(Stream::kShared, 2);
    ASSERT_LE(bytes->ids.size(), 2u) << "cycle " << cycle;
  }
  pool.check_invariants();
}

}  // namespace
}  // namespace kvpool::core
