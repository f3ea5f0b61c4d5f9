#include "core/owner_table.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace kvpool::core {
namespace {

TEST(OwnerTable, an_owner_is_found_from_add_to_remove) {
  OwnerTable owners;
  EXPECT_EQ(owners.find(7), kNoOwner);
  EXPECT_EQ(owners.find(0), kNoOwner);  // the id that a free slot holds
  owners.make_room();
  const std::uint32_t slot = owners.add(7, 1);
  EXPECT_NE(slot, kNoOwner);
  EXPECT_EQ(owners.find(7), slot);
  owners.remove(slot);
  EXPECT_EQ(owners.find(7), kNoOwner);
  EXPECT_FALSE(owners.is_active(slot));
}

TEST(OwnerTable, keeps_apart_ids_that_crowd_one_place) {
  // Multiples of a high power of two share the low bits of their hash.
  std::map<OwnerId, std::uint32_t> known;
  OwnerTable owners;
  std::mt19937 random(5);
  for (int step = 0; step < 20'000; ++step) {
    const OwnerId id =
        (static_cast<OwnerId>(random() % 200) - 100) * (OwnerId{1} << (step % 4 * 15));
    if (const auto found = known.find(id); found != known.end()) {
      ASSERT_EQ(owners.find(id), found->second);
      owners.remove(found->second);
      known.erase(found);
    } else {
      ASSERT_EQ(owners.find(id), kNoOwner);
      owners.make_room();
      known[id] = owners.add(id, 1);
    }
    ASSERT_EQ(owners.active(), known.size());
  }
  for (const auto& [id, slot] : known) EXPECT_EQ(owners.find(id), slot);
}

TEST(OwnerTable, slots_are_used_again_and_come_back_empty) {
  OwnerTable owners;
  owners.make_room();
  const std::uint32_t slot = owners.add(1, 10);
  owners[slot].registered = true;
  owners[slot].lists[0].count = 3;
  owners[slot].unused_slots = 5;
  owners.remove(slot);
  owners.make_room();
  ASSERT_EQ(owners.add(2, 20), slot);
  EXPECT_FALSE(owners[slot].needed());
  EXPECT_EQ(owners[slot].lists[0].head, kNoReference);
  EXPECT_EQ(owners[slot].unused_slots, 0);
  EXPECT_EQ(owners[slot].first_serial, 20u);
}

}  // namespace
}  // namespace kvpool::core
