#include "kvpool/storage/block_storage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/formats/format.h"

namespace kvpool::storage {
namespace {

using core::BlockHandle;
using core::BlockPoolAllocator;
using core::Stream;
using formats::Format;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::int64_t kBlockSize = 4;
constexpr std::int64_t kWidth = 8;
constexpr auto kNan = std::byte{0xff};

std::string refusal(auto&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

class BlockStorageTest : public testing::Test {
 protected:
  ~BlockStorageTest() override {
    storage.check_invariants();
    pool.check_invariants();
  }

  BlockHandle take(std::string_view format = "fp16", OwnerId owner = 1) {
    const BlockHandle block =
        pool.allocate(Stream::kShared, 1, owner, pool.intern_format(format)).front();
    pool.mark_used(block, 0);
    return block;
  }
  void give(const BlockHandle& block) { pool.free(std::span(&block, 1)); }

  std::vector<std::byte> rows(Format format, std::int64_t n, std::byte fill) const {
    return std::vector<std::byte>(static_cast<std::size_t>(n) * formats::row_bytes(format, kWidth),
                                  fill);
  }
  void fill(const BlockHandle& block, std::int64_t offset, std::int64_t n, std::byte byte) {
    const Format format = storage.format(block);
    storage.write(block, offset, format, rows(format, n, byte));
  }

  BlockPoolAllocator pool{{.block_size = kBlockSize, .n_blocks = 4, .separate_kv = false}};
  BlockStorage storage{pool, kWidth};
};

TEST_F(BlockStorageTest, rows_come_back_as_written_and_n_used_follows) {
  const BlockHandle block = take();
  fill(block, 0, 2, std::byte{7});
  EXPECT_EQ(pool.info(block)->n_used, 2);
  fill(block, 3, 1, std::byte{9});
  const BlockRows read = storage.read(block);
  EXPECT_EQ(read.n_rows, 4);
  std::vector<std::byte> expected = rows(Format::kFp16, 2, std::byte{7});
  expected.resize(48, std::byte{0});  // row 2 was never written
  expected.resize(64, std::byte{9});
  EXPECT_EQ(read.bytes, expected);
  fill(block, 0, 1, std::byte{1});
  EXPECT_EQ(pool.info(block)->n_used, 4);
}

TEST_F(BlockStorageTest, no_rows_are_fine) {
  const BlockHandle block = take();
  storage.write(block, kBlockSize, Format::kFp16, {});
  EXPECT_EQ(pool.info(block)->n_used, 0);
  EXPECT_EQ(storage.read(block).bytes.size(), 0u);
}

TEST_F(BlockStorageTest, fault_F19_a_new_owner_never_reads_the_last_ones_rows) {
  const BlockHandle first = take("fp16", 1);
  fill(first, 0, kBlockSize, std::byte{0x55});
  give(first);
  const BlockHandle second = take("fp16", 2);
  ASSERT_EQ(second.id, first.id);
  pool.mark_used(second, kBlockSize);
  EXPECT_THAT(storage.read(second).bytes, Each(std::byte{0}));
  fill(second, 1, 1, std::byte{3});
  EXPECT_THAT(storage.read_all(second).bytes, testing::Not(testing::Contains(std::byte{0x55})));
}

TEST_F(BlockStorageTest, field_G8_nan_left_in_unused_slots_never_shows) {
  const BlockHandle first = take();
  fill(first, 0, kBlockSize, kNan);
  give(first);
  const BlockHandle second = take();
  ASSERT_EQ(second.id, first.id);
  fill(second, 0, 1, std::byte{0});
  EXPECT_THAT(storage.read_all(second).bytes, Each(std::byte{0}));
}

TEST_F(BlockStorageTest, fault_F20_blocks_are_packed) {
  std::size_t expected = 0;
  for (const auto& [name, bytes] :
       {std::pair{"int4", 16u}, {"int3", 12u}, {"int2", 8u}, {"int1", 4u}}) {
    fill(take(name), 0, 1, std::byte{1});
    expected += bytes;
    EXPECT_EQ(storage.resident_bytes(), expected) << name;
  }
}

TEST_F(BlockStorageTest, fault_F22_a_block_with_rows_keeps_its_representation) {
  const BlockHandle block = take("int8");
  fill(block, 0, 1, std::byte{5});
  pool.set_format(block, pool.intern_format("int4"));
  EXPECT_THAT(refusal([&] { storage.read(block); }),
              HasSubstr("format of block 3 must stay 'int8' while it holds rows, got 'int4'"));
  pool.set_format(block, pool.intern_format("int8"));
  EXPECT_THAT(storage.read(block).bytes, Each(std::byte{5}));  // nothing was lost
  pool.mark_used(block, 0);
  pool.set_format(block, pool.intern_format("bf16"));
  EXPECT_EQ(storage.read_all(block).bytes.size(), 64u);
  EXPECT_THAT(storage.read_all(block).bytes, Each(std::byte{0}));
}

TEST_F(BlockStorageTest, fault_F23_only_a_checked_out_block_of_this_pool_is_written) {
  const auto row = rows(Format::kFp16, 1, std::byte{1});
  const BlockHandle freed = take();
  give(freed);
  EXPECT_THAT(refusal([&] { storage.write(freed, 0, Format::kFp16, row); }),
              HasSubstr("[BlockStorage::write] block 3 is stale"));
  pool.shrink(Stream::kShared, 0);
  EXPECT_THAT(refusal([&] { storage.write(freed, 0, Format::kFp16, row); }), HasSubstr("stale"));
  BlockPoolAllocator other{{.block_size = kBlockSize, .n_blocks = 4}};
  const BlockHandle foreign = other.allocate(Stream::kKey, 1, 1).front();
  EXPECT_THAT(refusal([&] { storage.write(foreign, 0, Format::kFp16, row); }),
              HasSubstr("is not of this storage's pool"));
  EXPECT_EQ(storage.resident_bytes(), 0u);
}

TEST_F(BlockStorageTest, fault_F17_retired_blocks_give_their_buffers_back) {
  std::vector<BlockHandle> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(take());
  for (const BlockHandle& block : blocks) fill(block, 0, 1, std::byte{1});
  pool.free(blocks);
  EXPECT_EQ(storage.resident_bytes(), 4 * 64u);
  pool.shrink(Stream::kShared, 1);
  EXPECT_EQ(storage.resident_bytes(), 64u);
  EXPECT_EQ(storage.idle_bytes(), 0u);
}

TEST_F(BlockStorageTest, misuse_is_refused_before_anything_changes) {
  const BlockHandle block = take();
  const auto expect = [&](std::int64_t offset, Format format, std::size_t bytes, const char* why) {
    EXPECT_THAT(
        refusal([&] { storage.write(block, offset, format, std::vector<std::byte>(bytes)); }),
        HasSubstr(why));
  };
  expect(3, Format::kFp16, 32, "leave room for 2 rows in a block of 4, got 3");
  expect(-1, Format::kFp16, 16, "offset must be >= 0");
  expect(std::numeric_limits<std::int64_t>::max(), Format::kFp16, 16, "offset must be >= 0");
  expect(0, Format::kFp16, 15, "whole rows of 16 bytes, got 15");
  expect(0, Format::kBf16, 16, "rows are 'bf16', the block is 'fp16'");
  EXPECT_EQ(pool.info(block)->n_used, 0);
  EXPECT_EQ(storage.resident_bytes(), 0u);
  EXPECT_THAT(refusal([&] { storage.format(take("kivi")); }),
              HasSubstr("format 'kivi' has no layout; those that have: fp32, fp16, bf16, int8"));
  EXPECT_THAT(refusal([&] { BlockStorage(pool, 0); }),
              HasSubstr("row_width must be in 1..1048576, got 0"));
  EXPECT_THAT(refusal([&] { BlockStorage(pool, std::int64_t{1} << 61); }),
              HasSubstr("row_width must be in 1..1048576, got 2305843009213693952"));
}

TEST_F(BlockStorageTest, a_shared_block_is_refused_until_it_is_copied) {
  const BlockHandle original = take();
  fill(original, 0, 2, std::byte{4});
  const BlockHandle shared = pool.fork(1, 2).front();
  EXPECT_THAT(refusal([&] { fill(shared, 2, 1, std::byte{5}); }),
              HasSubstr("block 3 has 2 references: make it writable first"));

  BlockHandle copy;
  ASSERT_EQ(storage.try_writable(shared, copy), std::nullopt);
  EXPECT_NE(copy.id, original.id);
  EXPECT_EQ(storage.read(copy).bytes, storage.read(original).bytes);
  fill(copy, 2, 1, std::byte{5});
  fill(original, 2, 1, std::byte{6});
  EXPECT_EQ(storage.read(copy).bytes.back(), std::byte{5});
  EXPECT_EQ(storage.read(original).bytes.back(), std::byte{6});

  BlockHandle same;
  ASSERT_EQ(storage.try_writable(copy, same), std::nullopt);
  EXPECT_EQ(same, copy);
}

TEST_F(BlockStorageTest, a_copy_that_the_pool_cannot_give_changes_nothing) {
  const BlockHandle original = take();
  fill(original, 0, 1, std::byte{4});
  const BlockHandle shared = pool.fork(1, 2).front();
  for (int i = 0; i < 3; ++i) take("fp16", 3);
  BlockHandle copy;
  EXPECT_TRUE(storage.try_writable(shared, copy).has_value());
  EXPECT_EQ(pool.info(shared)->n_references, 2);
  EXPECT_EQ(storage.resident_bytes(), 64u);
}

TEST_F(BlockStorageTest, a_copy_replaces_what_the_block_kept_from_before) {
  const BlockHandle other = take();
  const BlockHandle original = take();
  fill(other, 0, kBlockSize, std::byte{9});
  fill(original, 0, 1, std::byte{4});
  pool.free(std::span(&other, 1));
  const BlockHandle shared = pool.fork(1, 2).front();
  BlockHandle copy;
  ASSERT_EQ(storage.try_writable(shared, copy), std::nullopt);
  ASSERT_EQ(copy.id, other.id);
  EXPECT_EQ(storage.read_all(copy).bytes, storage.read_all(original).bytes);
  EXPECT_EQ(storage.resident_bytes(), 128u);
}

TEST_F(BlockStorageTest, field_G12_a_block_used_again_has_its_new_formats_size) {
  const BlockHandle first = take("fp16");
  fill(first, 0, kBlockSize, std::byte{0x77});
  give(first);
  const BlockHandle second = take("int4");
  ASSERT_EQ(second.id, first.id);
  EXPECT_EQ(storage.read_all(second).bytes.size(), 16u);
  EXPECT_THAT(storage.read_all(second).bytes, Each(std::byte{0}));
  EXPECT_EQ(storage.resident_bytes(), 16u);
}

TEST_F(BlockStorageTest, field_G13_a_recycled_buffer_is_accounted_with_its_own_size) {
  const BlockHandle first = take("fp16");
  fill(first, 0, 1, std::byte{1});
  give(first);
  fill(take("int1"), 0, 1, std::byte{1});  // 4 bytes; the fp16 buffer of 64 is set aside
  EXPECT_EQ(storage.idle_bytes(), 64u);
  fill(take("fp16", 2), 0, 1, std::byte{1});  // another block takes it
  EXPECT_EQ(storage.idle_bytes(), 0u);
  EXPECT_EQ(storage.resident_bytes(), 68u);
}

TEST_F(BlockStorageTest, field_G7_zeroing_one_block_leaves_its_neighbours) {
  const std::vector<BlockHandle> blocks = {take(), take(), take()};
  for (const BlockHandle& block : blocks) fill(block, 0, kBlockSize, std::byte{0x11});
  give(blocks[1]);
  const BlockHandle again = take();
  ASSERT_EQ(again.id, blocks[1].id);
  EXPECT_THAT(storage.read_all(again).bytes, Each(std::byte{0}));
  EXPECT_THAT(storage.read_all(blocks[0]).bytes, Each(std::byte{0x11}));
  EXPECT_THAT(storage.read_all(blocks[2]).bytes, Each(std::byte{0x11}));
}

TEST_F(BlockStorageTest, a_warm_pool_allocates_nothing) {
  const std::byte* where = nullptr;
  for (int round = 0; round < 3; ++round) {
    const BlockHandle block = take();
    fill(block, 0, 1, std::byte{1});
    if (round > 0) {
      EXPECT_EQ(storage.bytes(block).data(), where);
    }
    where = storage.bytes(block).data();
    give(block);
  }
  EXPECT_EQ(storage.resident_bytes(), 64u);
}

TEST_F(BlockStorageTest, release_lets_go_once_and_spares_the_next_checkout) {
  const BlockHandle block = take();
  fill(block, 0, 1, std::byte{1});
  storage.release(block);
  EXPECT_EQ(storage.resident_bytes(), 0u);
  storage.release(block);
  EXPECT_THAT(storage.read(block).bytes, Each(std::byte{0}));

  give(block);
  storage.release(block);  // stale, but the bytes are what it left behind
  EXPECT_EQ(storage.resident_bytes(), 0u);

  const BlockHandle next = take("fp16", 2);
  ASSERT_EQ(next.id, block.id);
  fill(next, 0, 1, std::byte{2});
  storage.release(block);
  EXPECT_THAT(storage.read(next).bytes, Each(std::byte{2}));
}

TEST_F(BlockStorageTest, release_of_a_shared_block_is_refused) {
  const BlockHandle block = take();
  fill(block, 0, 1, std::byte{1});
  const BlockHandle shared = pool.fork(1, 2).front();
  EXPECT_THAT(refusal([&] { storage.release(shared); }), HasSubstr("has 2 references"));
  give(block);
  storage.release(block);  // stale; the other owner still reads it
  EXPECT_THAT(storage.read(shared).bytes, Each(std::byte{1}));
}

TEST_F(BlockStorageTest, the_pool_may_outlive_its_storage) {
  {
    BlockStorage brief(pool, kWidth);
    const BlockHandle block = take();
    brief.write(block, 0, Format::kFp16, rows(Format::kFp16, 1, std::byte{1}));
    give(block);
  }
  pool.shrink(Stream::kShared, 0);
  EXPECT_EQ(pool.stats().n_blocks, 0);
}

TEST(BlockStorageLimits, idle_bytes_stay_below_their_limit) {
  BlockPoolAllocator pool{{.block_size = 1, .n_blocks = 4, .separate_kv = false}};
  BlockStorage storage(pool, 16, {.idle_limit_bytes = 100});
  std::vector<BlockHandle> blocks =
      pool.allocate(Stream::kShared, 4, 1, pool.intern_format("fp32"));
  for (const BlockHandle& block : blocks) (void)storage.bytes(block);
  EXPECT_EQ(storage.resident_bytes(), 256u);
  for (const BlockHandle& block : blocks) storage.release(block);
  EXPECT_EQ(storage.idle_bytes(), 64u);
  storage.drop_idle();
  EXPECT_EQ(storage.idle_bytes(), 0u);
  storage.check_invariants();
}

}  // namespace
}  // namespace kvpool::storage
