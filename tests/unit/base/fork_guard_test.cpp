#include "kvpool/base/fork_guard.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "support/forked.h"

namespace kvpool {
namespace {

TEST(ForkGuard, ids_are_never_zero_and_never_used_twice) {
  AdaptiveLock a;
  AdaptiveLock b;
  std::uint64_t first = 0;
  {
    ForkGuard guard(a);
    first = guard.id();
  }
  EXPECT_NE(first, 0u);
  EXPECT_GT(ForkGuard(b).id(), first);
}

TEST(ForkGuard, a_child_finds_the_lock_free_and_what_it_guards_whole) {
  AdaptiveLock lock;
  ForkGuard guard(lock);
  std::int64_t left = 0;
  std::int64_t right = 0;  // equal to left but inside the lock
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    while (!stop) {
      std::lock_guard held(lock);
      ++left;
      ++right;
    }
  });
  for (int i = 0; i < 30; ++i) {
    EXPECT_TRUE(testing::holds_in_child([&] {
      std::lock_guard held(lock);
      return left == right;
    }));
  }
  stop = true;
  writer.join();
}

// A thread that takes the inner lock while it holds the outer one must never meet a fork that holds
// the inner lock and waits for the outer one.
TEST(ForkGuard, outer_locks_are_taken_first) {
  AdaptiveLock locks[2];  // whichever lies lower in memory is outer once
  for (int outer : {0, 1}) {
    ForkGuard outer_guard(locks[outer], 1);
    ForkGuard inner_guard(locks[1 - outer]);
    std::atomic<bool> stop = false;
    std::thread nester([&] {
      while (!stop) {
        std::lock_guard first(locks[outer]);
        std::this_thread::yield();
        std::lock_guard second(locks[1 - outer]);
      }
    });
    for (int i = 0; i < 10; ++i) {
      EXPECT_TRUE(testing::holds_in_child([&] { return locks[0].try_lock(); }));
    }
    stop = true;
    nester.join();
  }
}

TEST(ForkGuard, the_fork_generation_grows_in_the_child_alone) {
  const std::uint64_t before = fork_generation();
  EXPECT_TRUE(testing::holds_in_child([&] {
    return fork_generation() == before + 1 &&
           testing::holds_in_child([&] { return fork_generation() == before + 2; });
  }));
  EXPECT_EQ(fork_generation(), before);
}

}  // namespace
}  // namespace kvpool
