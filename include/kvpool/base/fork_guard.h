#pragma once

#include <cstdint>

#include "kvpool/base/adaptive_lock.h"

namespace kvpool {

/// Keeps what `lock` guards usable in a child of fork(2): for the guard's lifetime fork waits until
/// it holds the lock, so the child never inherits a lock that a thread it does not have was
/// holding, nor half-made changes.
///
/// fork takes locks of a higher `level` first. Where code takes one guarded lock while it holds
/// another, the outer one needs the higher level. A pool's own lock is innermost: level 0.
class ForkGuard {
 public:
  explicit ForkGuard(AdaptiveLock& lock, int level = 0);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  /// Process-wide, never 0, never used twice.
  std::uint64_t id() const noexcept { return id_; }

 private:
  AdaptiveLock& lock_;
  std::uint64_t id_;
};

/// How many times fork(2) has led to this process since the library first counted: larger in a
/// child than in its parent. What a child cannot inherit, such as threads, is made anew where this
/// has grown. Costs a load.
std::uint64_t fork_generation();

}  // namespace kvpool
