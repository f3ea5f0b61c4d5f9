#pragma once

#include <memory>
#include <new>
#include <vector>

#include "kvpool/core/pool_observer.h"

namespace kvpool::core {

using ObserverList = std::vector<std::weak_ptr<PoolObserver>>;

/// What one call has to tell observers: gathered under the pool's lock, delivered after it. Costs
/// nothing where nobody observes.
class Notice {
 public:
  using Event = PoolObserver::Event;

  /// Call under the lock, before anything changes. Where there is no memory for the events the
  /// books still change and observers are not told: their next look at `checkout` tells them.
  void prepare(const std::shared_ptr<const ObserverList>& observers, std::int64_t n) noexcept {
    if (!observers) return;
    try {
      events_.reserve(static_cast<std::size_t>(n));
      observers_ = observers;
    } catch (const std::bad_alloc&) {
    }
  }
  bool wanted() const noexcept { return observers_ != nullptr; }
  void add(const Event& event) noexcept {
    if (wanted()) events_.push_back(event);
  }
  /// Call without the lock: PoolObserver::blocks_freed or blocks_retired.
  void deliver(void (PoolObserver::*what)(std::span<const Event>) noexcept) const noexcept {
    if (!wanted() || events_.empty()) return;
    for (const std::weak_ptr<PoolObserver>& weak : *observers_) {
      if (const std::shared_ptr<PoolObserver> observer = weak.lock()) (*observer.*what)(events_);
    }
  }

 private:
  std::shared_ptr<const ObserverList> observers_;
  std::vector<Event> events_;
};

}  // namespace kvpool::core
