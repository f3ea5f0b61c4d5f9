#include "kvpool/cache/buffer_growth.h"

#include <gtest/gtest.h>

#include "kvpool/base/error.h"

namespace kvpool::cache {
namespace {

std::int64_t rows_after(const BufferGrowth& growth, BufferShape now, std::int64_t n, int halvings) {
  return growth.after(now, n, halvings).rows;
}

TEST(BufferGrowth, exact_growth_adds_whole_steps_and_cuts_an_uneven_tail) {
  const auto growth = BufferGrowth::exact(10);
  EXPECT_EQ(growth.after({}, 3, 0), (BufferShape{3, 10, 3}));
  EXPECT_EQ(growth.after({3, 10, 3}, 7, 0), (BufferShape{10, 10, 10}));
  EXPECT_EQ(growth.after({10, 10, 10}, 1, 0), (BufferShape{11, 20, 11}));
  // 8 % 10 != 0: the two spare rows go, then one step comes.
  EXPECT_EQ(growth.after({8, 10, 8}, 5, 0), (BufferShape{13, 18, 13}));
}

TEST(BufferGrowth, spare_growth_adds_half_again_in_whole_quanta) {
  const auto growth = BufferGrowth::spare(256, 16);
  EXPECT_EQ(rows_after(growth, {}, 1, 0), 256);
  EXPECT_EQ(rows_after(growth, {256, 256, 256}, 1, 0), 512);
  EXPECT_EQ(rows_after(growth, {2048, 2048, 2048}, 1, 0), 3072);
  EXPECT_EQ(rows_after(growth, {256, 256, 256}, 2000, 0), 2304);
}

TEST(BufferGrowth, spare_growth_shrinks_to_single_blocks) {
  const auto growth = BufferGrowth::spare(256, 16);
  const BufferShape full{2048, 2048, 2048};
  EXPECT_EQ(rows_after(growth, full, 1, 1), 2064 + 512);  // 1,008 spare rows halved, in blocks
  EXPECT_EQ(rows_after(growth, full, 1, BufferGrowth::kNoSpare), 2064);
  EXPECT_EQ(rows_after(BufferGrowth::spare(300, 300), {}, 257, BufferGrowth::kNoSpare), 300);
}

TEST(BufferGrowth, a_lead_grows_early_and_only_where_there_is_room_for_all_of_it) {
  const auto growth = BufferGrowth::spare(256, 16).leading(3);
  EXPECT_EQ(rows_after(growth, {}, 1, 0), 256);
  EXPECT_EQ(rows_after(growth, {252, 256, 252}, 1, 0), 256);
  EXPECT_EQ(rows_after(growth, {253, 256, 253}, 1, 0), 512);
  EXPECT_EQ(rows_after(growth, {253, 256, 253}, 1, 1), 256);
}

TEST(BufferGrowth, field_E14_spare_growth_copies_far_fewer_rows_than_steps_of_256) {
  const auto copies = [](const BufferGrowth& growth) {
    BufferShape now;
    std::int64_t growths = 0;
    std::int64_t copied = 0;
    for (int i = 0; i < 4096; ++i) {
      const BufferShape next = growth.after(now, 1, 0);
      if (next.rows != now.rows) {
        ++growths;
        copied += now.rows;
      }
      now = next;
    }
    return std::pair(growths, copied);
  };
  EXPECT_EQ(copies(BufferGrowth::exact(256)), std::pair(std::int64_t{16}, std::int64_t{30720}));
  EXPECT_EQ(copies(BufferGrowth::spare(256, 16)), std::pair(std::int64_t{7}, std::int64_t{7936}));
}

TEST(BufferGrowth, field_F14_a_ring_keeps_its_window_and_the_chunk) {
  const auto growth = BufferGrowth::ring(8, 0, 256);
  BufferShape now = growth.after({}, 8, 0);
  EXPECT_EQ(now, (BufferShape{8, 8, 8}));
  for (int i = 0; i < 3; ++i) {
    now = growth.after(now, 3, 0);
    EXPECT_EQ(now.rows, 10);
  }
  EXPECT_EQ(growth.after(now, 1, 0), (BufferShape{18, 8, 1}));
}

TEST(BufferGrowth, field_F3_a_wrapped_ring_is_not_trimmable) {
  const auto growth = BufferGrowth::ring(8, 0, 256);
  BufferShape now;
  for (int i = 0; i < 20; ++i) now = growth.after(now, 1, 0);
  EXPECT_EQ(now, (BufferShape{20, 8, 4}));
  EXPECT_FALSE(growth.is_trimmable(now));
}

TEST(BufferGrowth, a_ring_keeps_its_first_tokens_when_it_rotates) {
  const auto growth = BufferGrowth::ring(8, 2, 4);
  BufferShape now;
  for (int i = 0; i < 9; ++i) now = growth.after(now, 1, 0);
  EXPECT_EQ(now, (BufferShape{9, 8, 3}));
}

TEST(BufferGrowth, a_ring_fills_its_window_in_smaller_steps_where_the_pool_is_short) {
  const auto growth = BufferGrowth::ring(100, 0, 256, 16);
  const BufferShape now = growth.after({}, 9, 0);
  EXPECT_EQ(growth.after(now, 1, 0).rows, 100);
  EXPECT_EQ(growth.after(now, 1, 1).rows, 16 + 48);
  EXPECT_EQ(growth.after(now, 1, BufferGrowth::kNoSpare), (BufferShape{10, 16, 10}));
  const auto exact = BufferGrowth::ring(100, 0, 40);
  EXPECT_EQ(exact.after(now, 1, BufferGrowth::kNoSpare).rows, 49);
}

TEST(BufferGrowth, a_full_ring_has_no_spare_rows) {
  const auto growth = BufferGrowth::ring(8, 0, 4, 2);
  EXPECT_EQ(growth.tightened({3, 8, 3}), (BufferShape{3, 4, 3}));
  EXPECT_EQ(growth.tightened({8, 8, 8}), (BufferShape{8, 8, 8}));
  EXPECT_EQ(growth.tightened({9, 8, 1}), (BufferShape{9, 8, 1}));
  // Its last step was taken back: the index lies among the tokens although none was ever dropped.
  EXPECT_EQ(growth.tightened({8, 8, 0}), (BufferShape{8, 8, 0}));
}

TEST(BufferGrowth, trimming_drops_the_blocks_that_it_empties) {
  const auto growth = BufferGrowth::spare(256, 16);
  EXPECT_EQ(growth.trimmed({40, 256, 40}, 2, 16), (BufferShape{38, 256, 38}));  // same block
  EXPECT_EQ(growth.trimmed({40, 256, 40}, 9, 16), (BufferShape{31, 32, 31}));
  EXPECT_EQ(growth.trimmed({10, 256, 10}, 10, 16), (BufferShape{0, 0, 0}));
  EXPECT_EQ(growth.trimmed({20, 20, 20}, 1, 16), (BufferShape{19, 20, 19}));
}

TEST(BufferGrowth, undoing_a_ring_step_leaves_what_the_next_token_sees) {
  const auto growth = BufferGrowth::ring(8, 0, 256);
  BufferShape full = growth.after({}, 8, 0);
  const BufferShape one = growth.after(full, 1, 0);
  EXPECT_EQ(growth.undone(full, one, 8, true), (BufferShape{8, 8, 0}));
  EXPECT_EQ(growth.undone(full, one, 8, false), full);
  // A chunk of 3 pushed out the oldest token of eight: its row is the next one to be written.
  const BufferShape chunk = growth.after(full, 3, 0);
  EXPECT_EQ(growth.undone(full, chunk, chunk.rows, true), (BufferShape{8, 8, 7}));
  EXPECT_EQ(growth.undone({4, 4, 4}, {5, 8, 5}, 8, true), (BufferShape{4, 4, 4}));
  const BufferShape early = growth.after({2, 2, 2}, 3, 0);
  EXPECT_EQ(growth.undone({2, 2, 2}, early, early.rows, true), (BufferShape{2, 2, 2}));
}

TEST(BufferGrowth, undoing_a_linear_step_gives_back_what_it_grew_by) {
  const auto growth = BufferGrowth::exact(4);
  EXPECT_EQ(growth.undone({4, 4, 4}, {5, 8, 5}, 8, true), (BufferShape{4, 4, 4}));
  EXPECT_EQ(growth.undone({4, 4, 4}, {5, 8, 5}, 4, false), (BufferShape{4, 4, 4}));
  EXPECT_EQ(growth.undone({3, 4, 3}, {4, 4, 4}, 4, true), (BufferShape{3, 4, 3}));
}

TEST(BufferGrowth, sizes_out_of_range_are_refused) {
  EXPECT_THROW((void)BufferGrowth::exact(0), InvalidArgument);
  EXPECT_THROW((void)BufferGrowth::spare(0, 1), InvalidArgument);
  EXPECT_THROW((void)BufferGrowth::ring(0, 0, 1), InvalidArgument);
  EXPECT_THROW((void)BufferGrowth::ring(4, 4, 1), InvalidArgument);
}

}  // namespace
}  // namespace kvpool::cache
