#include "core/history_ring.h"

#include <gmock/gmock.h>

namespace kvpool::core {
namespace {

std::vector<std::int64_t> frees_of(const HistoryRing<4>& ring) {
  std::vector<AllocationStats> snapshots;
  ring.copy_to(snapshots);
  std::vector<std::int64_t> frees;
  for (const AllocationStats& stats : snapshots) frees.push_back(stats.n_frees);
  return frees;
}

TEST(HistoryRing, keeps_the_latest_oldest_first) {
  HistoryRing<4> ring;
  EXPECT_THAT(frees_of(ring), testing::IsEmpty());
  AllocationStats stats;
  for (stats.n_frees = 1; stats.n_frees <= 3; ++stats.n_frees) ring.add(stats);
  EXPECT_THAT(frees_of(ring), testing::ElementsAre(1, 2, 3));
  for (; stats.n_frees <= 10; ++stats.n_frees) ring.add(stats);
  EXPECT_THAT(frees_of(ring), testing::ElementsAre(7, 8, 9, 10));
}

TEST(HistoryRing, copies_every_field) {
  const AllocationStats stats{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  HistoryRing<4> ring;
  ring.add(stats);
  std::vector<AllocationStats> snapshots;
  ring.copy_to(snapshots);
  EXPECT_THAT(snapshots, testing::ElementsAre(stats));
}

}  // namespace
}  // namespace kvpool::core
