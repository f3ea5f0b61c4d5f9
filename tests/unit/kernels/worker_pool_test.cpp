#include "kvpool/kernels/worker_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "support/forked.h"

namespace kvpool::kernels {
namespace {

using ::testing::Each;

// How often each item was done. Plain ints: ThreadSanitizer sees an item that is done twice at once
// and a run that returns too early.
std::vector<int> counts_of(WorkerPool& pool, std::int64_t n_items) {
  std::vector<int> counts(static_cast<std::size_t>(n_items));
  pool.run(n_items, [&](std::int64_t i, int) noexcept { ++counts[static_cast<std::size_t>(i)]; });
  return counts;
}

TEST(WorkerPool, every_item_is_done_once_before_run_returns) {
  for (const int n_threads : {1, 2, 4}) {
    WorkerPool pool(n_threads);
    for (const std::int64_t n_items : {0, 1, 2, 3, 7, 1000}) {
      EXPECT_THAT(counts_of(pool, n_items), Each(1));
    }
  }
}

TEST(WorkerPool, many_short_runs_one_after_another) {
  WorkerPool pool(3);
  std::int64_t total = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::vector<int> counts = counts_of(pool, 5);
    total += std::accumulate(counts.begin(), counts.end(), 0);
    if (i % 500 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // they fall asleep
  }
  EXPECT_EQ(total, 10000);
}

TEST(WorkerPool, workers_are_numbered_below_n_threads_and_never_share_a_number) {
  WorkerPool pool(4);
  std::vector<std::atomic<bool>> taken(4);
  std::atomic<int> wrong = 0;
  pool.run(200, [&](std::int64_t, int worker) noexcept {
    if (worker < 0 || worker >= 4 || taken[static_cast<std::size_t>(worker)].exchange(true)) {
      ++wrong;
      return;
    }
    std::this_thread::yield();
    taken[static_cast<std::size_t>(worker)] = false;
  });
  EXPECT_EQ(wrong, 0);
}

TEST(WorkerPool, two_items_that_wait_for_each_other_run_at_the_same_time) {
  WorkerPool pool(2);
  std::atomic<int> here = 0;
  pool.run(2, [&](std::int64_t, int) noexcept {
    ++here;
    while (here != 2) std::this_thread::yield();
  });
  EXPECT_EQ(here, 2);
}

TEST(WorkerPool, callers_at_the_same_time_each_get_all_of_their_items) {
  WorkerPool pool(2);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const std::vector<int> counts = counts_of(pool, 20);
        wrong += !std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(WorkerPool, an_item_may_run_more_items) {
  WorkerPool pool(2);
  std::atomic<int> done = 0;
  pool.run(4, [&](std::int64_t, int) noexcept {
    pool.run(4, [&](std::int64_t, int) noexcept { ++done; });
  });
  EXPECT_EQ(done, 16);
}

// ThreadSanitizer refuses threads that start after a fork of several.
#if defined(__SANITIZE_THREAD__)
#define SKIP_WHERE_A_CHILD_HAS_NO_THREADS() GTEST_SKIP() << "not under ThreadSanitizer"
#else
#define SKIP_WHERE_A_CHILD_HAS_NO_THREADS()
#endif

TEST(WorkerPool, a_child_of_fork_starts_threads_of_its_own) {
  SKIP_WHERE_A_CHILD_HAS_NO_THREADS();
  WorkerPool used(2);
  WorkerPool unused(2);
  EXPECT_THAT(counts_of(used, 100), Each(1));
  const auto both_threads_run = [](WorkerPool& pool) {
    std::atomic<int> here = 0;
    pool.run(2, [&](std::int64_t, int) noexcept {
      ++here;
      while (here != 2) std::this_thread::yield();
    });
    return here == 2;
  };
  EXPECT_TRUE(testing::holds_in_child([&] {
    return both_threads_run(used) && both_threads_run(unused) &&
           testing::holds_in_child([&] { return both_threads_run(used); });
  }));
  EXPECT_TRUE(both_threads_run(used));
}

TEST(WorkerPool, a_child_of_a_fork_in_the_middle_of_a_run_finds_the_threads_free) {
  SKIP_WHERE_A_CHILD_HAS_NO_THREADS();
  WorkerPool pool(2);
  std::atomic<bool> stop = false;
  std::thread caller([&] {
    while (!stop) (void)counts_of(pool, 50);
  });
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(testing::holds_in_child([&] {
      const std::vector<int> counts = counts_of(pool, 100);
      return std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; });
    }));
  }
  stop = true;
  caller.join();
}

TEST(WorkerPool, a_pool_that_was_used_in_the_parent_may_end_in_the_child) {
  auto pool = std::make_unique<WorkerPool>(2);
  EXPECT_THAT(counts_of(*pool, 10), Each(1));
  EXPECT_TRUE(testing::holds_in_child([&] {
    pool.reset();
    return true;
  }));
}

TEST(WorkerPool, zero_threads_means_the_processors_that_the_process_may_use) {
  EXPECT_GE(available_processors(), 1);
  EXPECT_EQ(WorkerPool().n_threads(), std::min(available_processors(), WorkerPool::kMaxThreads));
  EXPECT_EQ(WorkerPool(3).n_threads(), 3);
}

TEST(WorkerPool, a_number_of_threads_out_of_range_is_refused) {
  for (const int n_threads : {-1, WorkerPool::kMaxThreads + 1}) {
    try {
      WorkerPool pool(n_threads);
      FAIL() << n_threads;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()),
                "[WorkerPool] n_threads must be in 0..1024, got " + std::to_string(n_threads));
    }
  }
}

}  // namespace
}  // namespace kvpool::kernels
