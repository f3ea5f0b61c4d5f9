#pragma once

#include <cstdint>
#include <optional>

#include "kvpool/base/ids.h"
#include "kvpool/core/block_pool_allocator.h"
#include "kvpool/core/shortage.h"

namespace kvpool::cache {

/// Pairs of a key and a value block that are kept for an owner while its layers take them one by
/// one. What the owner had reserved itself is there to be drawn on, and what is left of that stays
/// afterwards. Without separate streams both blocks of a pair come from the one list.
class StepReservation {
 public:
  using Pool = core::BlockPoolAllocator;

  StepReservation() = default;
  StepReservation(const StepReservation&) = delete;
  StepReservation& operator=(const StepReservation&) = delete;

  /// Replaces an open reservation, which close() ends.
  [[nodiscard]] std::optional<core::Shortage> open(Pool& pool, OwnerId owner, std::int64_t pairs);
  /// A layer took so many.
  void note_taken(std::int64_t pairs) noexcept { taken_pairs_ += pairs; }
  void close(Pool& pool, OwnerId owner) noexcept;

  /// Whether the owner could have so many pairs now. A guess: other owners may come in between.
  static bool has_room(const Pool& pool, OwnerId owner, std::int64_t pairs);

 private:
  /// The owner's own reservation before; `keys` stands for the one list.
  std::int64_t keys_ = 0;
  std::int64_t values_ = 0;
  std::int64_t taken_pairs_ = 0;
  bool open_ = false;
};

}  // namespace kvpool::cache
