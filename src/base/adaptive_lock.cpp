#include "kvpool/base/adaptive_lock.h"

#include <chrono>
#include <thread>

#include "kvpool/base/pause.h"

namespace kvpool {

namespace {

// Rounds of waiting of each kind. A waiter is starving once it has been through them; a newcomer
// defers to a starving waiter for as many.
constexpr int kPauseRounds = 8;
constexpr int kYieldRounds = 64;
constexpr int kPatience = kPauseRounds + kYieldRounds;
// A starving waiter goes on yielding, but sleeps in one round of so many: a holder of a lower
// real-time priority would never run while others only yield.
constexpr int kRoundsPerSleep = 16;
constexpr std::chrono::microseconds kSleep{50};

void wait(int round) noexcept {
  if (round < kPauseRounds) {
    for (int i = 0; i < (1 << round); ++i) pause_processor();
  } else if (round < kPatience || round % kRoundsPerSleep != 0) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace

void AdaptiveLock::lock_slowly() noexcept {
  bool starving = false;
  for (int round = 0;; round = (round + 1) % (1 << 20)) {
    wait(round);
    if (round == kPatience && !starving) {
      starving = true;
      starving_.fetch_add(1, std::memory_order_relaxed);
    }
    if (!starving && starving_.load(std::memory_order_relaxed) != 0) continue;
    if (!held_.load(std::memory_order_relaxed) && try_lock()) break;
  }
  if (starving) starving_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace kvpool
