#pragma once

#include <vector>

#include "kvpool/base/adaptive_lock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/core/pool_observer.h"

namespace kvpool::cache {

class PagedGroup;

/// The groups of a PagedPool, so that blocks that were freed behind one are free at once although
/// its tables keep pins for views to come.
///
/// Its lock is taken inside a group's lock, and a group's inside it only where nobody has to wait.
class GroupRegistry : public core::PinObserver {
 public:
  void add(PagedGroup* group);
  void remove(PagedGroup* group) noexcept;
  void blocks_detained(OwnerId owner) noexcept override;

 private:
  AdaptiveLock lock_;
  std::vector<PagedGroup*> groups_;
  ForkGuard fork_guard_{lock_, 2};
};

}  // namespace kvpool::cache
