#pragma once

#include <string>
#include <string_view>

#include "kvpool/core/allocation_stats.h"

namespace kvpool::metrics {

/// `stats` in the Prometheus text exposition format (version 0.0.4), newline at the end: gauges
/// blocks_in_use, blocks_total, fragmentation (six decimals), peak_blocks_in_use, counters
/// allocations_total, frees_total, reused_total, exhausted_total, grown_total, retired_total, then
/// the gauge unused_slots, each as a TYPE line and a sample named `<prefix>_<metric>`.
/// Throws InvalidArgument where `prefix` does not match [a-zA-Z_:][a-zA-Z0-9_:]*.
std::string to_prometheus(const core::AllocationStats& stats, std::string_view prefix);

}  // namespace kvpool::metrics
