#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "kvpool/core/allocation_stats.h"

namespace kvpool::core {

/// The last Capacity snapshots; adding one is a copy into place.
template <std::size_t Capacity>
class HistoryRing {
  static_assert((Capacity & (Capacity - 1)) == 0);

 public:
  void add(const AllocationStats& stats) noexcept {
    // Word by word: the counters have just been stored one at a time, and a load that spans two
    // stores waits until both have left the store buffer, which took a third of a call's time.
    static_assert(std::is_standard_layout_v<AllocationStats> &&
                  sizeof(AllocationStats) % sizeof(std::int64_t) == 0);
    const auto* from = reinterpret_cast<const volatile std::int64_t*>(&stats);
    auto* to = reinterpret_cast<volatile std::int64_t*>(&entries_[added_++ & (Capacity - 1)]);
    for (std::size_t i = 0; i < sizeof(AllocationStats) / sizeof(std::int64_t); ++i)
      to[i] = from[i];
  }

  /// Fills `out`, whose capacity must be at least Capacity, oldest first.
  void copy_to(std::vector<AllocationStats>& out) const noexcept {
    for (std::uint64_t i = added_ < Capacity ? 0 : added_ - Capacity; i < added_; ++i) {
      out.push_back(entries_[i & (Capacity - 1)]);
    }
  }

 private:
  std::array<AllocationStats, Capacity> entries_;
  std::uint64_t added_ = 0;
};

}  // namespace kvpool::core
