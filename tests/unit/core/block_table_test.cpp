#include "core/block_table.h"

#include <gmock/gmock.h>

namespace kvpool::core {
namespace {

using testing::ElementsAre;

std::vector<std::uint32_t> ids_from_top(const BlockTable& blocks, int list) {
  std::vector<std::uint32_t> ids;
  for (std::uint32_t i = blocks.list(list).top; i != kNoReference; i = blocks[i].links.prev) {
    ids.push_back(blocks[i].id);
  }
  return ids;
}

void mint(BlockTable& blocks, std::int64_t n) {
  blocks.make_room(n);
  blocks.mint(0, Stream::kKey, n);
}

TEST(BlockTable, mints_ascending_ids_with_the_highest_on_top) {
  BlockTable blocks;
  mint(blocks, 3);
  EXPECT_THAT(ids_from_top(blocks, 0), ElementsAre(2, 1, 0));
  EXPECT_EQ(blocks.managed(), 3);
}

TEST(BlockTable, retires_never_used_blocks_before_the_coldest) {
  BlockTable blocks;
  mint(blocks, 5);
  blocks[1].ever_allocated = blocks[3].ever_allocated = blocks[4].ever_allocated = true;
  std::vector<std::uint32_t> retired;
  const auto note = [&](std::uint32_t index) { retired.push_back(blocks[index].id); };
  blocks.retire(0, 1, note);
  EXPECT_THAT(retired, ElementsAre(0));  // of 0 and 2, the one that lay deeper
  blocks.retire(0, 2, note);
  EXPECT_THAT(ids_from_top(blocks, 0), ElementsAre(4, 3));  // 2, then the coldest: 1
  blocks.retire(0, 2, note);
  EXPECT_THAT(ids_from_top(blocks, 0), ElementsAre());
  EXPECT_EQ(blocks.managed(), 0);
}

TEST(BlockTable, uses_retired_records_again_under_new_ids) {
  BlockTable blocks;
  mint(blocks, 2);
  blocks[0].serial = 9;
  blocks.retire(0, 2, [](std::uint32_t) {});
  mint(blocks, 3);
  EXPECT_EQ(blocks.size(), 3u);
  EXPECT_THAT(ids_from_top(blocks, 0), ElementsAre(4, 3, 2));
  EXPECT_EQ(blocks[0].serial, 9u);  // so that handles of id 0 are still known to be stale
  EXPECT_TRUE(blocks[0].recycled);
  EXPECT_FALSE(blocks[0].retired);
}

TEST(BlockTable, runs_out_of_ids_after_the_last_32_bit_one) {
  BlockTable blocks(BlockTable::kMaxIds - 3);
  EXPECT_EQ(blocks.mintable(), 3);
  mint(blocks, 2);
  EXPECT_EQ(blocks.mintable(), 1);
  mint(blocks, 1);
  EXPECT_EQ(blocks.mintable(), 0);
  EXPECT_THAT(ids_from_top(blocks, 0), ElementsAre(0xffff'ffffu, 0xffff'fffeu, 0xffff'fffdu));
}

}  // namespace
}  // namespace kvpool::core
