#include "kvpool/metrics/prometheus.h"

#include <gtest/gtest.h>

#include "kvpool/base/error.h"

namespace kvpool::metrics {
namespace {

core::AllocationStats sample() {
  core::AllocationStats stats;
  stats.n_blocks = 12;
  stats.n_allocations = 9;
  stats.n_frees = 4;
  stats.n_reused = 2;
  stats.n_exhausted = 1;
  stats.n_grown = 6;
  stats.n_retired = 2;
  stats.peak_blocks_in_use = 7;
  stats.fragmented_count = 1;
  stats.unused_slot_count = 3;
  return stats;
}

TEST(Prometheus, writes_each_metric_once_in_the_published_order) {
  EXPECT_EQ(to_prometheus(sample(), "pool"),
            "# TYPE pool_blocks_in_use gauge\npool_blocks_in_use 5\n"
            "# TYPE pool_blocks_total gauge\npool_blocks_total 12\n"
            "# TYPE pool_fragmentation gauge\npool_fragmentation 0.083333\n"
            "# TYPE pool_peak_blocks_in_use gauge\npool_peak_blocks_in_use 7\n"
            "# TYPE pool_allocations_total counter\npool_allocations_total 9\n"
            "# TYPE pool_frees_total counter\npool_frees_total 4\n"
            "# TYPE pool_reused_total counter\npool_reused_total 2\n"
            "# TYPE pool_exhausted_total counter\npool_exhausted_total 1\n"
            "# TYPE pool_grown_total counter\npool_grown_total 6\n"
            "# TYPE pool_retired_total counter\npool_retired_total 2\n"
            "# TYPE pool_unused_slots gauge\npool_unused_slots 3\n");
}

TEST(Prometheus, writes_whole_and_empty_shares_with_six_decimals) {
  core::AllocationStats stats;
  EXPECT_NE(to_prometheus(stats, "a").find("a_fragmentation 0.000000\n"), std::string::npos);
  stats.n_blocks = stats.fragmented_count = 1;
  EXPECT_NE(to_prometheus(stats, "a").find("a_fragmentation 1.000000\n"), std::string::npos);
}

TEST(Prometheus, refuses_a_prefix_that_is_no_metric_name) {
  for (const char* prefix : {"", "9a", "a-b", "a b", "a\nb", "\xc3\xa9"}) {
    EXPECT_THROW(to_prometheus({}, prefix), InvalidArgument) << prefix;
  }
  for (const char* prefix : {"a", "_", ":a9", "kvpool:block_pool"}) {
    EXPECT_NO_THROW(to_prometheus({}, prefix)) << prefix;
  }
}

}  // namespace
}  // namespace kvpool::metrics
