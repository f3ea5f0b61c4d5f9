#pragma once

#include <atomic>

namespace kvpool {

/// A lock for critical sections of some tens of nanoseconds, a std::lock_guard away from use.
///
/// Free: one atomic exchange to take, one plain store to release. Held: waiters only read, with
/// pauses that double, so that the holder keeps the cache line and runs at full speed; then they
/// yield the processor, then sleep in growing steps, so that a holder that was preempted gets to
/// run whatever the priorities. Not fair, not recursive, and released by the thread that took it
/// (or, after fork(2), by its copy in the child: see ForkGuard).
class AdaptiveLock {
 public:
  AdaptiveLock() = default;
  AdaptiveLock(const AdaptiveLock&) = delete;
  AdaptiveLock& operator=(const AdaptiveLock&) = delete;

  void lock() noexcept {
    if (!try_lock()) lock_slowly();
  }
  bool try_lock() noexcept { return !held_.exchange(true, std::memory_order_acquire); }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

 private:
  void lock_slowly() noexcept;

  std::atomic<bool> held_{false};
};

}  // namespace kvpool
