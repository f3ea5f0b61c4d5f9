#include "kvpool/base/fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <vector>

namespace kvpool {

namespace {

struct Entry {
  AdaptiveLock* lock;
  int level;
};

// The library's one global. Never destroyed, so that guards of static lifetime may outlast it.
struct Registry {
  AdaptiveLock lock;  // taken before any registered lock, never while one is held
  std::uint64_t last_id = 0;
  std::atomic<std::uint64_t> generation{0};
  std::vector<Entry> entries;  // in the order in which fork takes them
};

Registry& registry();

void before_fork() {
  registry().lock.lock();
  for (const Entry& entry : registry().entries) entry.lock->lock();
}

void after_fork_in_parent() {
  for (const Entry& entry : registry().entries) entry.lock->unlock();
  registry().lock.unlock();
}

void after_fork_in_child() {
  for (const Entry& entry : registry().entries) entry.lock->unlock_in_child();
  registry().generation.fetch_add(1, std::memory_order_relaxed);
  registry().lock.unlock_in_child();
}

Registry& registry() {
  static Registry& instance = []() -> Registry& {
    if (const int error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)) {
      throw std::system_error(error, std::generic_category(), "[ForkGuard] pthread_atfork");
    }
    return *new Registry;
  }();
  return instance;
}

}  // namespace

ForkGuard::ForkGuard(AdaptiveLock& lock, int level) : lock_(lock) {
  Registry& all = registry();
  std::lock_guard guard(all.lock);
  const auto before = [](const Entry& a, const Entry& b) {
    return a.level != b.level ? a.level > b.level : std::less<>()(a.lock, b.lock);
  };
  const Entry entry{&lock, level};
  all.entries.insert(std::upper_bound(all.entries.begin(), all.entries.end(), entry, before),
                     entry);
  id_ = ++all.last_id;
}

ForkGuard::~ForkGuard() {
  Registry& all = registry();
  std::lock_guard guard(all.lock);
  std::erase_if(all.entries, [this](const Entry& entry) { return entry.lock == &lock_; });
}

std::uint64_t fork_generation() { return registry().generation.load(std::memory_order_relaxed); }

}  // namespace kvpool
