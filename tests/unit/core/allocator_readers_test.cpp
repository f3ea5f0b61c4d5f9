// Pins, and references that are shared block by block.
#include <gmock/gmock.h>

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::core {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

struct Pool : BlockPoolAllocator {
  explicit Pool(std::int64_t n_blocks, bool separate_kv = false)
      : BlockPoolAllocator({.block_size = 16, .n_blocks = n_blocks, .separate_kv = separate_kv}) {}

  using BlockPoolAllocator::n_free;
  std::int64_t n_free() const { return BlockPoolAllocator::n_free(Stream::kShared); }
  std::vector<BlockHandle> alloc(OwnerId owner, std::int64_t n_blocks) {
    return allocate(Stream::kShared, 16 * n_blocks, owner);
  }
};

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(AllocatorReaders, field_D3_a_block_that_is_read_is_not_handed_out) {
  Pool pool(4);
  const auto read = pool.alloc(1, 1);
  pool.pin(read);
  pool.free(read);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 3);
  EXPECT_EQ(pool.stats().blocks_in_use(), 1);
  EXPECT_FALSE(pool.is_active(1));
  for (const BlockHandle& block : pool.alloc(2, 3)) EXPECT_NE(block.id, read[0].id);
  EXPECT_THROW(pool.alloc(2, 1), BlockPoolExhausted);
  pool.unpin(read);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 1);
  EXPECT_EQ(pool.alloc(2, 1)[0].id, read[0].id);
}

TEST(AllocatorReaders, a_block_pinned_by_a_handle_whose_owner_has_left_it_is_not_handed_out) {
  Pool pool(4);
  const auto first = pool.alloc(1, 1);
  const auto second = pool.fork(1, 2);
  pool.pin(second);
  pool.free(second);
  pool.free(first);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 3);
  pool.unpin(second);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 4);
}

TEST(AllocatorReaders, field_D10_freeing_an_owner_in_mid_step_is_deferred) {
  Pool pool(8);
  const auto blocks = pool.alloc(1, 3);
  pool.pin(std::span(blocks).first(2));
  EXPECT_EQ(pool.free_all(1), 3);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 6);
  EXPECT_EQ(pool.stats().n_frees, 1);
  EXPECT_EQ(pool.stats().blocks_in_use(), 2);
  pool.unpin(std::span(blocks).first(2));
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 8);
  EXPECT_EQ(pool.stats().n_frees, 3);
}

TEST(AllocatorReaders, a_pin_is_no_reference) {
  Pool pool(2);
  const auto block = pool.alloc(1, 1);
  pool.pin(block);
  EXPECT_EQ(pool.info(block[0])->n_references, 1);
  pool.mark_used(block[0], 3);
  BlockHandle own;
  EXPECT_FALSE(pool.try_writable(block[0], own));
  EXPECT_EQ(own, block[0]);
  pool.unpin(block);
  EXPECT_EQ(pool.n_free(), 1);
  pool.check_invariants();
}

TEST(AllocatorReaders, a_detained_block_counts_with_its_fill) {
  Pool pool(2);
  const auto block = pool.alloc(1, 1);
  pool.mark_used(block[0], 5);
  pool.pin(block);
  pool.free(block);
  EXPECT_EQ(pool.stats().unused_slots(), 11);
  EXPECT_EQ(pool.stats().fragmented_count, 1);
  EXPECT_EQ(pool.shrink(Stream::kShared, 0), 1);
  EXPECT_EQ(pool.stats().n_blocks, 1);
  pool.unpin(block);
  pool.check_invariants();
  EXPECT_EQ(pool.stats().unused_slots(), 0);
}

TEST(AllocatorReaders, the_last_of_references_and_pins_frees) {
  Pool pool(4);
  const auto first = pool.alloc(1, 2);
  pool.pin(first);
  const auto second = pool.fork(1, 2);
  pool.pin(second);
  pool.free_all(1);
  pool.unpin(first);
  EXPECT_EQ(pool.n_free(), 2);
  pool.free_all(2);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 2);
  pool.unpin(second);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 4);
}

TEST(AllocatorReaders, bad_handles_are_refused_before_anything_changes) {
  Pool pool(4);
  Pool other(4);
  const auto blocks = pool.alloc(1, 2);
  const auto foreign = other.alloc(1, 1);
  EXPECT_THROW(pool.pin(std::vector{blocks[0], foreign[0]}), InvalidArgument);
  pool.free(std::span(blocks).last(1));
  EXPECT_THROW(pool.pin(blocks), InvalidArgument);
  EXPECT_THAT(message_of([&] { pool.unpin(std::span(blocks).first(1)); }),
              HasSubstr("[BlockPoolAllocator::unpin] block "));
  pool.free_all(1);
  EXPECT_EQ(pool.n_free(), 4);
  pool.check_invariants();
}

TEST(AllocatorReaders, share_gives_one_more_reference_even_to_the_same_owner) {
  Pool pool(8);
  const auto blocks = pool.alloc(1, 2);
  pool.alloc(2, 1);
  std::vector<BlockHandle> copies(2);
  std::vector<BlockHandle> same(2);
  pool.share(blocks, 2, copies);
  pool.share(blocks, 1, same);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 5);
  EXPECT_EQ(pool.info(blocks[0])->n_references, 3);
  EXPECT_THAT(pool.blocks_for(2), SizeIs(3));
  pool.free(blocks);
  EXPECT_EQ(pool.info(same[1])->n_references, 2);
  pool.free_all(2);
  pool.free(same);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 8);
}

TEST(AllocatorReaders, a_pair_is_made_writable_together_or_not_at_all) {
  Pool pool(6, true);  // 3 of keys, 3 of values
  std::vector<BlockHandle> tails(2);
  ASSERT_FALSE(
      pool.try_allocate_kv(5, 1, {}, {}, std::span(tails).first(1), std::span(tails).last(1)));
  std::vector<BlockHandle> copies(2);
  pool.share(tails, 2, copies);
  pool.allocate(Stream::kValue, 32, 3);
  std::vector<BlockHandle> own(2);
  EXPECT_TRUE(pool.try_writable(copies, own));
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(Stream::kKey), 2);
  pool.free_all(3);
  EXPECT_FALSE(pool.try_writable(copies, copies));
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(Stream::kKey), 1);
  EXPECT_EQ(pool.n_free(Stream::kValue), 1);
  EXPECT_EQ(pool.info(copies[0])->n_references, 1);
  EXPECT_EQ(pool.info(copies[1])->n_used, 5);
  EXPECT_THROW((void)pool.try_writable(std::vector{tails[0], tails[0]}, own), InvalidArgument);
}

// Every block that has a reference or a pin stays off the free list, and every other is on it.
TEST(AllocatorReaders, random_owners_and_readers_keep_exactly_what_they_use) {
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  Pool pool(24);
  std::map<OwnerId, std::vector<BlockHandle>> held;
  std::vector<std::vector<BlockHandle>> readers;
  std::map<BlockId, int> uses;
  const auto count = [&](const std::vector<BlockHandle>& blocks, int n) {
    for (const BlockHandle& block : blocks) uses[block.id] += n;
  };
  for (int step = 0; step < 4000; ++step) {
    const auto owner = static_cast<OwnerId>(below(5));
    std::vector<BlockHandle>& mine = held[owner];
    switch (below(7)) {
      case 0:
      case 1: {
        std::vector<BlockHandle> fresh(1 + below(3));
        if (pool.try_allocate(Stream::kShared, 16 * static_cast<std::int64_t>(fresh.size()), owner,
                              {}, fresh)) {
          break;
        }
        count(fresh, 1);
        mine.insert(mine.end(), fresh.begin(), fresh.end());
        break;
      }
      case 2: {  // some of them
        if (mine.empty()) break;
        const std::vector<BlockHandle> some(mine.begin() + below(mine.size()), mine.end());
        mine.resize(mine.size() - some.size());
        pool.free(some);
        count(some, -1);
        break;
      }
      case 3:
        EXPECT_EQ(pool.free_all(owner), static_cast<std::int64_t>(mine.size()));
        count(mine, -1);
        mine.clear();
        break;
      case 4: {
        std::vector<BlockHandle> copies(mine.size());
        const auto other = static_cast<OwnerId>(below(5));
        pool.share(mine, other, copies);
        count(copies, 1);
        held[other].insert(held[other].end(), copies.begin(), copies.end());
        break;
      }
      case 5:
        if (readers.size() > 4) break;
        pool.pin(mine);
        readers.push_back(mine);
        count(mine, 1);
        break;
      case 6: {
        if (readers.empty()) break;
        std::swap(readers[below(readers.size())], readers.back());
        pool.unpin(readers.back());
        count(readers.back(), -1);
        readers.pop_back();
        break;
      }
    }
    std::int64_t in_use = 0;
    for (const auto& [id, n] : uses) in_use += n > 0;
    ASSERT_EQ(pool.stats().blocks_in_use(), in_use) << step;
    ASSERT_NO_THROW(pool.check_invariants()) << step;
  }
}

}  // namespace
}  // namespace kvpool::core
