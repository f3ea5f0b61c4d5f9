// The allocator's contract, for every shape of pool.
#include <gmock/gmock.h>

#include <algorithm>
#include <ostream>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::core {

void PrintTo(const PoolConfig& config, std::ostream* out) {
  *out << (config.separate_kv ? "separate" : "shared")
       << (config.grow_on_exhaustion ? " growing" : "") << (config.max_blocks ? " capped" : "");
}

namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

class AllocatorConformance : public testing::TestWithParam<PoolConfig> {
 protected:
  void TearDown() override { pool.check_invariants(); }

  /// The calls below use the stream that every shape of pool has.
  static constexpr Stream kStream = Stream::kKey;
  std::int64_t free_blocks() const { return pool.n_free(kStream); }
  std::int64_t most() const { return pool.n_allocatable(kStream, 1); }
  bool grows() const { return GetParam().grow_on_exhaustion; }
  bool grows_without_end() const { return grows() && !GetParam().max_blocks; }

  BlockPoolAllocator pool{GetParam()};
};

TEST_P(AllocatorConformance, a_request_takes_as_many_blocks_as_its_tokens_need) {
  EXPECT_THAT(pool.allocate(kStream, 9, 1), SizeIs(3));
  const std::vector<BlockHandle> blocks = pool.blocks_for(1);
  EXPECT_EQ(pool.info(blocks[0])->n_used, 4);
  EXPECT_EQ(pool.info(blocks[1])->n_used, 4);
  EXPECT_EQ(pool.info(blocks[2])->n_used, 1);
  EXPECT_EQ(pool.stats().fragmented_count, 1);
  EXPECT_EQ(pool.stats().unused_slots(), 3);
}

TEST_P(AllocatorConformance, ids_start_with_the_highest_of_the_stream_and_go_down) {
  const auto blocks = pool.allocate(kStream, 16, 1);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(value(blocks[i].id), 7 - i) << "both shapes have keys 0..7";
  }
}

TEST_P(AllocatorConformance, copies_are_runs_with_a_tail_of_their_own) {
  const auto blocks = pool.allocate(kStream, 5, 1, {}, 3);
  ASSERT_THAT(blocks, SizeIs(6));
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(pool.info(blocks[i])->n_used, i % 2 ? 1 : 4);
}

TEST_P(AllocatorConformance, keys_and_values_come_together_or_not_at_all) {
  std::vector<BlockHandle> keys(2), values(2);
  const FormatTag int8 = pool.intern_format("int8");
  ASSERT_FALSE(pool.try_allocate_kv(5, 1, {}, int8, keys, values));
  for (const BlockHandle& key : keys) EXPECT_EQ(pool.info(key)->format, FormatTag{});
  for (const BlockHandle& value : values) EXPECT_EQ(pool.info(value)->format, int8);
  EXPECT_EQ(keys[0].stream, GetParam().separate_kv ? Stream::kKey : Stream::kShared);
  EXPECT_EQ(values[0].stream, GetParam().separate_kv ? Stream::kValue : Stream::kShared);
  if (grows_without_end()) return;

  // Fewer blocks than both need, though enough for either.
  (void)pool.allocate(Stream::kValue, 4 * (pool.n_allocatable(Stream::kValue, 1) - 1), 1);
  const AllocationStats before = pool.stats();
  EXPECT_TRUE(pool.try_allocate_kv(5, 2, {}, {}, keys, values));
  AllocationStats after = pool.stats();
  EXPECT_EQ(after.n_exhausted, before.n_exhausted + 1);
  after.n_exhausted = before.n_exhausted;
  EXPECT_EQ(after, before);
  EXPECT_FALSE(pool.is_active(2));
}

TEST_P(AllocatorConformance, a_shortage_says_what_was_needed_and_what_there_was) {
  if (grows_without_end()) return;
  const std::int64_t needed = most() + 1;
  std::vector<BlockHandle> out(needed);
  const auto shortage = pool.try_allocate(kStream, 4 * needed, 5, {}, out);
  ASSERT_TRUE(shortage);
  EXPECT_EQ(shortage->needed, needed);
  EXPECT_EQ(shortage->available, needed - 1);
  EXPECT_EQ(shortage->owner, 5);
  EXPECT_EQ(shortage->managed, 8);
  EXPECT_EQ(shortage->stream, GetParam().separate_kv ? Stream::kKey : Stream::kShared);
  EXPECT_EQ(pool.stats().n_exhausted, 1);
  EXPECT_EQ(pool.stats().n_grown, 0);
  EXPECT_THROW((void)pool.allocate(kStream, 4 * needed, 5), BlockPoolExhausted);
}

TEST_P(AllocatorConformance, a_request_beyond_any_pool_is_a_shortage_and_takes_no_memory) {
  for (std::int64_t n_tokens : {std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()}) {
    EXPECT_THROW((void)pool.allocate(kStream, n_tokens, 1, {}, n_tokens), BlockPoolExhausted);
    EXPECT_TRUE(pool.try_reserve(1, n_tokens, n_tokens));
  }
  EXPECT_EQ(pool.stats().n_exhausted, 4);
}

TEST_P(AllocatorConformance, growth_mints_exactly_what_is_missing) {
  if (!grows()) return;
  const auto first = pool.allocate(kStream, 4 * free_blocks(), 1);
  const std::int64_t managed = pool.stats().n_blocks;
  const auto more = pool.allocate(kStream, 8, 1);
  EXPECT_EQ(pool.stats().n_blocks, managed + 2);
  EXPECT_EQ(pool.stats().n_grown, 2);
  EXPECT_EQ(value(more[0].id), managed + 1);
  EXPECT_EQ(value(more[1].id), managed);
}

TEST_P(AllocatorConformance, freed_blocks_are_handed_out_last_in_first_out) {
  const auto blocks = pool.allocate(kStream, 16, 1);
  pool.free(std::vector{blocks[2], blocks[0]});
  const auto again = pool.allocate(kStream, 8, 2);
  EXPECT_EQ(again[0].id, blocks[0].id);
  EXPECT_EQ(again[1].id, blocks[2].id);
  EXPECT_EQ(pool.stats().n_reused, 2);
  EXPECT_EQ(pool.blocks_for(1), (std::vector{blocks[1], blocks[3]}));
}

TEST_P(AllocatorConformance, freeing_all_of_an_owner_in_order_is_freeing_each) {
  pool.register_owner(1);
  ASSERT_FALSE(pool.try_reserve(1, 3, 0));
  const auto blocks = pool.allocate(kStream, 7, 1);
  pool.free(blocks);
  pool.check_invariants();
  EXPECT_EQ(pool.stats().blocks_in_use(), 0);
  EXPECT_EQ(pool.stats().unused_slots(), 0);
  EXPECT_EQ(pool.n_reserved(kStream, 1), 1) << "what is left of the reservation stays";
  EXPECT_THROW(pool.register_owner(1), OwnerAlreadyActive) << "so does the registration";
  for (const BlockHandle& block : blocks) EXPECT_FALSE(pool.info(block));
  pool.free(blocks);  // all stale
  const auto again = pool.allocate(kStream, 7, 1);
  EXPECT_THAT(again, SizeIs(2));
  EXPECT_EQ(again[0].id, blocks[1].id) << "the block freed last comes first";
  EXPECT_EQ(again[1].id, blocks[0].id);
  pool.free(blocks);  // of the checkout before: these do not touch the new one
  EXPECT_THAT(pool.blocks_for(1), SizeIs(2));
}

TEST_P(AllocatorConformance, stale_handles_are_harmless_to_free_and_refused_elsewhere) {
  const auto old = pool.allocate(kStream, 4, 1);
  pool.free_all(1);
  const auto mine = pool.allocate(kStream, 4, 2);
  ASSERT_EQ(mine[0].id, old[0].id);
  pool.free(old);
  EXPECT_EQ(pool.blocks_for(2), mine);
  EXPECT_FALSE(pool.info(old[0]));
  EXPECT_THROW(pool.mark_used(old[0], 1), InvalidArgument);
  EXPECT_THROW(pool.set_format(old[0], {}), InvalidArgument);
  BlockHandle out;
  EXPECT_THROW((void)pool.try_writable(old[0], out), InvalidArgument);
}

TEST_P(AllocatorConformance, a_fork_shares_every_block_in_order_and_takes_none) {
  const auto blocks = pool.allocate(kStream, 10, 1);
  const AllocationStats before = pool.stats();
  const auto shared = pool.fork(1, 2);
  EXPECT_EQ(pool.stats(), before);
  ASSERT_THAT(shared, SizeIs(3));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(shared[i].id, blocks[i].id);
    EXPECT_EQ(pool.info(shared[i])->n_references, 2);
    EXPECT_EQ(pool.info(shared[i])->checkout, pool.info(blocks[i])->checkout);
    EXPECT_EQ(pool.info(shared[i])->owner, 2);
  }
  pool.free_all(1);
  EXPECT_EQ(pool.stats().n_frees, 0);
  EXPECT_EQ(pool.blocks_for(2), shared);
  pool.free_all(2);
  EXPECT_EQ(pool.stats().n_frees, 3);
}

TEST_P(AllocatorConformance, the_first_write_to_a_shared_block_copies_it) {
  const auto blocks = pool.allocate(kStream, 6, 1);
  const auto shared = pool.fork(1, 2);
  EXPECT_THROW(pool.mark_used(shared[1], 3), InvalidArgument);
  pool.mark_used(shared[1], 2);  // as it is already
  BlockHandle mine;
  ASSERT_FALSE(pool.try_writable(shared[1], mine));
  EXPECT_NE(mine.id, shared[1].id);
  EXPECT_EQ(pool.info(mine)->n_used, 2);
  EXPECT_EQ(pool.blocks_for(2), (std::vector{shared[0], mine}));
  EXPECT_EQ(pool.blocks_for(1), blocks);
  EXPECT_FALSE(pool.info(shared[1]));
  EXPECT_EQ(pool.stats().n_allocations, 3);
  // Each is now its owner's alone.
  for (const BlockHandle& handle : {mine, blocks[1]}) {
    BlockHandle same;
    ASSERT_FALSE(pool.try_writable(handle, same));
    EXPECT_EQ(same, handle);
    pool.mark_used(handle, 4);
  }
  EXPECT_EQ(pool.stats().n_allocations, 3);
}

TEST_P(AllocatorConformance, mark_used_moves_the_gauges) {
  const auto blocks = pool.allocate(kStream, 8, 1);
  pool.mark_used(blocks, 1);
  EXPECT_EQ(pool.stats().fragmented_count, 2);
  EXPECT_EQ(pool.stats().unused_slots(), 6);
  pool.mark_used(blocks[0], 0);
  EXPECT_EQ(pool.stats().fragmented_count, 1);
  pool.free_all(1);
  EXPECT_EQ(pool.stats().fragmented_count, 0);
  EXPECT_EQ(pool.stats().unused_slots(), 0);
}

TEST_P(AllocatorConformance, reserved_blocks_are_nobody_elses) {
  ASSERT_FALSE(pool.try_reserve(1, 5, 0));
  EXPECT_EQ(free_blocks() - pool.n_available(kStream), 5);
  EXPECT_EQ(pool.n_reserved(kStream, 1), 5);
  if (!grows_without_end()) {
    std::vector<BlockHandle> out(pool.n_allocatable(kStream, 2) + 1);
    EXPECT_TRUE(pool.try_allocate(kStream, 4 * std::ssize(out), 2, {}, out));
  }
  (void)pool.allocate(kStream, 12, 1);
  EXPECT_EQ(pool.n_reserved(kStream, 1), 2);
  ASSERT_FALSE(pool.try_reserve(1, 1, 0));
  EXPECT_EQ(pool.n_reserved(kStream, 1), 1);
  pool.free_all(1);
  EXPECT_EQ(pool.n_reserved(kStream, 1), 0);
  EXPECT_EQ(pool.n_available(kStream), free_blocks());
}

TEST_P(AllocatorConformance, a_cancelled_reservation_leaves_no_owner) {
  ASSERT_FALSE(pool.try_reserve(1, 2, 2));
  EXPECT_TRUE(pool.is_active(1));
  ASSERT_FALSE(pool.try_reserve(1, 0, 0));
  EXPECT_FALSE(pool.is_active(1));
}

TEST_P(AllocatorConformance, a_registration_lasts_until_it_is_released) {
  pool.register_owner(1);
  EXPECT_THROW(pool.register_owner(1), OwnerAlreadyActive);
  pool.free(pool.allocate(kStream, 4, 1));
  EXPECT_TRUE(pool.is_active(1));
  pool.release_owner(1);
  pool.release_owner(1);
  EXPECT_FALSE(pool.is_active(1));
  (void)pool.allocate(kStream, 4, 1);
  EXPECT_THROW(pool.register_owner(1), OwnerAlreadyActive);
  EXPECT_THROW(pool.release_owner(1), InvalidArgument);
  pool.free_all(1);
  EXPECT_FALSE(pool.is_active(1));
}

TEST_P(AllocatorConformance, minted_owners_are_refused_until_they_are_minted) {
  const OwnerId minted = pool.new_owner();
  EXPECT_FALSE(pool.is_active(minted));
  EXPECT_NE(pool.new_owner(), minted);
  const OwnerId not_yet = minted + 2;
  EXPECT_THROW(pool.register_owner(not_yet), InvalidArgument);
  EXPECT_THROW((void)pool.allocate(kStream, 1, not_yet), InvalidArgument);
  EXPECT_THROW((void)pool.try_reserve(not_yet, 1, 1), InvalidArgument);
  EXPECT_THROW(pool.fork(1, not_yet), InvalidArgument);
  EXPECT_THAT(pool.allocate(kStream, 1, minted), SizeIs(1));
  EXPECT_EQ(pool.free_all(not_yet), 0);
}

TEST_P(AllocatorConformance, shrink_retires_free_blocks_down_to_the_target) {
  const auto held = pool.allocate(kStream, 8, 1);
  EXPECT_EQ(pool.shrink(kStream, 100), 0);
  const std::int64_t managed = pool.stats().n_blocks;
  const std::int64_t retired = pool.shrink(kStream, 2);
  EXPECT_EQ(retired, pool.stats().n_retired);
  EXPECT_EQ(free_blocks(), 2);
  EXPECT_EQ(pool.stats().n_blocks, managed - retired);
  EXPECT_EQ(pool.blocks_for(1), held);
}

TEST_P(AllocatorConformance, history_tells_of_each_call_that_counts) {
  const std::vector<BlockHandle> blocks = pool.allocate(kStream, 4, 1);  // 1
  pool.mark_used(blocks[0], 1);
  pool.free(blocks);                // 2
  pool.free(blocks);                // 3: stale
  pool.free({});                    // 4
  pool.free_all(9);                 // 5: unknown
  (void)pool.try_reserve(1, 1, 0);  // 6
  EXPECT_EQ(pool.shrink(kStream, 1'000), 0);
  EXPECT_EQ(pool.shrink(kStream, 1),
            GetParam().n_blocks / (GetParam().separate_kv ? 2 : 1) - 1);  // 7
  const std::vector<AllocationStats> history = pool.history();
  ASSERT_THAT(history, SizeIs(7));
  EXPECT_EQ(history[0].n_allocations, 1);
  EXPECT_EQ(history[0].n_frees, 0);
  EXPECT_EQ(history[1].n_frees, 1);
  EXPECT_EQ(history.back(), pool.stats());
}

TEST_P(AllocatorConformance, refuses_arguments_before_anything_changes) {
  std::vector<BlockHandle> out(1);
  EXPECT_THROW((void)pool.try_allocate(kStream, 0, 1, {}, out), InvalidArgument);
  EXPECT_THROW((void)pool.try_allocate(kStream, -4, 1, {}, out), InvalidArgument);
  EXPECT_THROW((void)pool.try_allocate(kStream, 5, 1, {}, out), InvalidArgument)
      << "out is too small";
  EXPECT_THROW((void)pool.try_allocate(kStream, 1, 1, {}, out, 0), InvalidArgument);
  EXPECT_THROW((void)pool.try_allocate(kStream, 1, 1, FormatTag{7}, out), InvalidArgument);
  EXPECT_THROW((void)pool.try_reserve(1, -1, 0), InvalidArgument);
  EXPECT_THROW((void)pool.try_reserve(1, 0, -1), InvalidArgument);
  EXPECT_THROW(pool.shrink(kStream, -1), InvalidArgument);
  EXPECT_THROW((void)pool.format_name(FormatTag{7}), InvalidArgument);
  EXPECT_FALSE(pool.is_active(1));
  EXPECT_THAT(pool.history(), IsEmpty());
}

PoolConfig shape(bool separate, bool grow, bool cap) {
  // 8 key blocks either way.
  PoolConfig config{.block_size = 4, .n_blocks = separate ? 16 : 8, .separate_kv = separate};
  config.grow_on_exhaustion = grow;
  if (cap) config.max_blocks = config.n_blocks + 4;
  return config;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AllocatorConformance,
                         testing::Values(shape(true, false, false), shape(false, false, false),
                                         shape(true, true, false), shape(false, true, false),
                                         shape(true, true, true), shape(false, true, true)));

}  // namespace
}  // namespace kvpool::core
