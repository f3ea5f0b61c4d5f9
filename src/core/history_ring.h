#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/core/allocation_stats.h"

namespace kvpool::core {

/// The last Capacity snapshots; adding one is a copy into place.
template <std::size_t Capacity>
class HistoryRing {
  static_assert((Capacity & (Capacity - 1)) == 0);

 public:
  void add(const AllocationStats& stats) noexcept { entries_[added_++ & (Capacity - 1)] = stats; }

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
