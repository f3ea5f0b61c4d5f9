#pragma once

#include <atomic>
#include <cstdint>

namespace kvpool {

/// A lock for critical sections of some tens of nanoseconds; use it through std::lock_guard.
///
/// Free: one atomic exchange to take, one plain store to release. Held: waiters only read, with
/// pauses that double, so that the holder keeps the cache line and runs at full speed; then they
/// yield the processor, and now and then sleep, so that a holder that was preempted gets to run
/// whatever the priorities. Whoever has waited through all that is *starving*: newcomers then let
/// it go first. Otherwise not fair; not recursive; released by the thread that took it (or, after
/// fork(2), by its copy in the child: see ForkGuard).
class AdaptiveLock {
 public:
  AdaptiveLock() = default;
  AdaptiveLock(const AdaptiveLock&) = delete;
  AdaptiveLock& operator=(const AdaptiveLock&) = delete;

  void lock() noexcept {
    if (starving_.load(std::memory_order_relaxed) != 0 || !try_lock()) lock_slowly();
  }
  bool try_lock() noexcept { return !held_.exchange(true, std::memory_order_acquire); }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

  /// Releases the lock in a child of fork(2), which has none of the threads that were waiting.
  void unlock_in_child() noexcept {
    starving_.store(0, std::memory_order_relaxed);
    unlock();
  }

 private:
  void lock_slowly() noexcept;

  std::atomic<bool> held_{false};
  std::atomic<std::uint32_t> starving_{0};  // waiters that newcomers let go first
};

}  // namespace kvpool
