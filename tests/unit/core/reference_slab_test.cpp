#include "core/reference_slab.h"

#include <gtest/gtest.h>

namespace kvpool::core {
namespace {

TEST(ReferenceSlab, slots_come_back_last_in_first_out_with_their_serial) {
  ReferenceSlab slab;
  slab.make_room(3);
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_EQ(slab.take(), i);
    slab[i].serial = 10 + i;
  }
  slab.give_back(0);
  slab.give_back(2);
  EXPECT_EQ(slab.live(), 1);
  EXPECT_EQ(slab[2].links.owner, kNoOwner);
  EXPECT_EQ(slab[2].serial, 12u);  // handles of it stay known as stale
  EXPECT_EQ(slab.take(), 2u);
  EXPECT_EQ(slab.take(), 0u);
  slab.make_room(1);
  EXPECT_EQ(slab.take(), 3u);
  EXPECT_EQ(slab.live(), 4);
}

TEST(ReferenceSlab, refuses_more_references_than_it_can_number) {
  ReferenceSlab slab;
  slab.make_room(1);
  slab.take();
  EXPECT_THROW(slab.make_room(kMaxReferences), Error);
  EXPECT_EQ(slab.size(), 1u);
}

}  // namespace
}  // namespace kvpool::core
