#include "kvpool/cache/step_reservation.h"

#include <algorithm>
#include <utility>

namespace kvpool::cache {

using core::Stream;

std::optional<core::Shortage> StepReservation::open(Pool& pool, OwnerId owner, std::int64_t pairs) {
  close(pool, owner);
  const bool separate = pool.config().separate_kv;
  const std::int64_t had_keys = pool.n_reserved(separate ? Stream::kKey : Stream::kShared, owner);
  const std::int64_t had_values = separate ? pool.n_reserved(Stream::kValue, owner) : 0;
  // An owner's own reservation is there to be drawn on: only what it lacks is added.
  const std::int64_t keys = std::max(had_keys, separate ? pairs : 2 * pairs);
  const std::int64_t values = separate ? std::max(had_values, pairs) : 0;
  if (auto shortage = pool.try_reserve(owner, keys, values)) return shortage;
  keys_ = had_keys;
  values_ = had_values;
  taken_pairs_ = 0;
  open_ = true;
  return std::nullopt;
}

void StepReservation::close(Pool& pool, OwnerId owner) noexcept {
  if (!std::exchange(open_, false)) return;
  try {
    const bool separate = pool.config().separate_kv;
    const std::int64_t keys = keys_ - (separate ? taken_pairs_ : 2 * taken_pairs_);
    const std::int64_t values = separate ? values_ - taken_pairs_ : 0;
    const bool all_taken =
        pool.n_reserved(separate ? Stream::kKey : Stream::kShared, owner) <=
            std::max<std::int64_t>(keys, 0) &&
        (!separate || pool.n_reserved(Stream::kValue, owner) <= std::max<std::int64_t>(values, 0));
    if (all_taken) return;
    // Never more than is reserved now, so there is no shortage to hear of.
    (void)pool.try_reserve(owner, std::max<std::int64_t>(keys, 0),
                           std::max<std::int64_t>(values, 0));
  } catch (...) {  // NOLINT(bugprone-empty-catch)
    // Out of memory: the reservation stays until the owner's next.
  }
}

bool StepReservation::has_room(const Pool& pool, OwnerId owner, std::int64_t pairs) {
  if (!pool.config().separate_kv) {
    return pairs <= pool.n_allocatable(Stream::kShared, owner) / 2;
  }
  const auto missing = [&](Stream stream) {
    const std::int64_t at_hand = pool.n_available(stream) + pool.n_reserved(stream, owner);
    return std::pair(std::max<std::int64_t>(pairs - at_hand, 0),
                     pool.n_allocatable(stream, owner) - at_hand);
  };
  const auto [missing_keys, key_growth] = missing(Stream::kKey);
  const auto [missing_values, value_growth] = missing(Stream::kValue);
  // Growth is shared: what keys grow by, values cannot.
  return missing_keys + missing_values <= std::min(key_growth, value_growth);
}

}  // namespace kvpool::cache
