#include "group_registry.h"

#include <algorithm>
#include <mutex>

#include "kvpool/cache/paged_group.h"

namespace kvpool::cache {

void GroupRegistry::add(PagedGroup* group) {
  const std::lock_guard guard(lock_);
  groups_.push_back(group);
}

void GroupRegistry::remove(PagedGroup* group) noexcept {
  const std::lock_guard guard(lock_);
  const auto place = std::ranges::find(groups_, group);
  if (place == groups_.end()) return;
  *place = groups_.back();
  groups_.pop_back();
}

void GroupRegistry::blocks_detained(OwnerId owner) noexcept {
  const std::lock_guard guard(lock_);
  for (PagedGroup* group : groups_) {
    if (group->owner() == owner) group->give_up_pins_if_lost();
  }
}

}  // namespace kvpool::cache
