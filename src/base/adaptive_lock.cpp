#include "kvpool/base/adaptive_lock.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace kvpool {

namespace {

// Rounds of waiting before the next, dearer kind.
constexpr int kPauseRounds = 8;
constexpr int kYieldRounds = 64;
constexpr std::chrono::microseconds kFirstSleep{50};
constexpr std::chrono::microseconds kLongestSleep{1000};

void pause_processor() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

void wait(int round) noexcept {
  if (round < kPauseRounds) {
    for (int i = 0; i < (1 << round); ++i) pause_processor();
  } else if (round < kPauseRounds + kYieldRounds) {
    std::this_thread::yield();
  } else {
    const int doublings = std::min(round - kPauseRounds - kYieldRounds, 5);
    std::this_thread::sleep_for(std::min(kFirstSleep * (1 << doublings), kLongestSleep));
  }
}

}  // namespace

void AdaptiveLock::lock_slowly() noexcept {
  for (int round = 0;; round += round < 1 << 20) {
    wait(round);
    if (!held_.load(std::memory_order_relaxed) && try_lock()) return;
  }
}

}  // namespace kvpool
