#include "kvpool/cache/group_step.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvpool::cache {
namespace {

bool half_way(const std::vector<int>& moved) {
  return stopped_half_way(moved, [](int layer) { return layer != 0; });
}

TEST(GroupStep, stopped_half_way_where_the_layers_at_the_end_have_not_moved) {
  EXPECT_TRUE(half_way({1, 0}));
  EXPECT_TRUE(half_way({1, 1, 0, 0}));
  // Nobody moved, all moved, and a layer that is left out.
  EXPECT_FALSE(half_way({}));
  EXPECT_FALSE(half_way({0, 0}));
  EXPECT_FALSE(half_way({1, 1}));
  EXPECT_FALSE(half_way({1, 0, 1}));
  EXPECT_FALSE(half_way({0, 1}));
}

TEST(GroupStep, the_most_tokens_that_fit_are_found_among_fewer_than_were_asked_for) {
  for (std::int64_t room = 0; room < 20; ++room) {
    EXPECT_EQ(tokens_that_fit(20, [&](std::int64_t n) { return n <= room; }), room);
  }
  EXPECT_EQ(tokens_that_fit(1, [](std::int64_t) { return true; }), 0);
}

TEST(GroupStep, the_message_counts_in_singular_and_plural) {
  EXPECT_EQ(step_message("no room", 8, 3, 7), "no room for 8 tokens in 3 layers; 7 tokens fit");
  EXPECT_EQ(step_message("no room", 1, 1, 0), "no room for 1 token in 1 layer; 0 tokens fit");
  EXPECT_EQ(step_message("no room", 2, 1, 1), "no room for 2 tokens in 1 layer; 1 token fits");
}

}  // namespace
}  // namespace kvpool::cache
