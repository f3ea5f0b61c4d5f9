#pragma once

#include <memory>
#include <new>
#include <vector>

#include "kvpool/core/pool_observer.h"

namespace kvpool::core {

using ObserverList = std::vector<std::weak_ptr<PoolObserver>>;
using PinObserverList = std::vector<std::weak_ptr<PinObserver>>;

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
  /// `owner` lost a block that is pinned.
  void add_detained(OwnerId owner,
                    const std::shared_ptr<const PinObserverList>& observers) noexcept {
    if (!observers || (!detained_.empty() && detained_.back() == owner)) return;
    try {
      detained_.push_back(owner);
      pin_observers_ = observers;
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
      // The next use of what is pinned finds out.
    }
  }
  /// Call without the lock: PoolObserver::blocks_freed or blocks_retired.
  void deliver(void (PoolObserver::*what)(std::span<const Event>) noexcept) const noexcept {
    for (const OwnerId owner : detained_) {
      for (const std::weak_ptr<PinObserver>& weak : *pin_observers_) {
        if (const std::shared_ptr<PinObserver> observer = weak.lock()) {
          observer->blocks_detained(owner);
        }
      }
    }
    if (!wanted() || events_.empty()) return;
    for (const std::weak_ptr<PoolObserver>& weak : *observers_) {
      if (const std::shared_ptr<PoolObserver> observer = weak.lock()) (*observer.*what)(events_);
    }
  }

 private:
  std::shared_ptr<const ObserverList> observers_;
  std::vector<Event> events_;
  std::shared_ptr<const PinObserverList> pin_observers_;
  std::vector<OwnerId> detained_;
};

}  // namespace kvpool::core
