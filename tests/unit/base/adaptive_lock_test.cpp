#include "kvpool/base/adaptive_lock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace kvpool {
namespace {

TEST(AdaptiveLock, lets_one_thread_in_at_a_time) {
  AdaptiveLock lock;
  std::int64_t count = 0;  // not atomic: a second thread inside would lose additions
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) {
        std::lock_guard guard(lock);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 8 * 20'000);
}

TEST(AdaptiveLock, cannot_be_tried_while_held) {
  AdaptiveLock lock;
  EXPECT_TRUE(lock.try_lock());
  EXPECT_FALSE(lock.try_lock());
  lock.unlock();
  EXPECT_TRUE(lock.try_lock());
}

TEST(AdaptiveLock, outlasts_a_holder_that_sleeps) {
  AdaptiveLock lock;
  bool done = false;
  lock.lock();
  std::thread waiter([&] {
    std::lock_guard guard(lock);
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(done);
  lock.unlock();
  waiter.join();
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace kvpool
