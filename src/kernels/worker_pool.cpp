#include "kvpool/kernels/worker_pool.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/base/pause.h"

namespace kvpool::kernels {

namespace {

// About 20 us: the gap between two layers' attention, so that a decode step finds its threads
// awake.
constexpr int kSpins = 1000;

/// Waits until `word` differs from `old`: spins first, since waking a sleeper takes longer than
/// most work does.
void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t old) noexcept {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_processor();
  }
  word.wait(old, std::memory_order_acquire);
}

/// Signals are the business of the threads that the application made.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

/// The threads of one process, and the work they do at the moment.
///
/// door_ says whether the work may be entered and how many threads are inside. The caller writes
/// work_ while nobody is inside, opens the door, takes items like everybody else, closes the door
/// once none is left, and waits until all who entered have left. So a thread that wakes late finds
/// a closed door (or the next work) and nobody waits for it.
// What many threads write lies in lines of its own.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
class WorkerPool::Team {
 public:
  explicit Team(int n_threads) {
    const SignalsBlocked blocked;
    try {
      threads_.reserve(static_cast<std::size_t>(n_threads - 1));
      for (int worker = 1; worker < n_threads; ++worker) {
        threads_.emplace_back([this, worker] { serve(worker); });
      }
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // The system has no more threads to give: those that run are enough.
    }
  }

  ~Team() {
    stop_.store(true, std::memory_order_relaxed);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::uint64_t generation() const noexcept { return generation_; }

  /// False where another caller has the threads.
  bool try_run(const Work& work) noexcept {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    work_ = work;
    next_.store(0, std::memory_order_relaxed);
    door_.store(kOpen, std::memory_order_release);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
    take_items(0);
    std::uint32_t inside = door_.fetch_and(~kOpen, std::memory_order_acquire) & ~kOpen;
    while (inside != 0) {
      wait_for_change(door_, inside);
      inside = door_.load(std::memory_order_acquire);
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr std::uint32_t kOpen = 1u << 31;

  void serve(int worker) noexcept {
    for (std::uint32_t seen = 0;; seen = calls_.load(std::memory_order_acquire)) {
      if (enter()) {
        take_items(worker);
        if (door_.fetch_sub(1, std::memory_order_release) == 1) door_.notify_one();
      }
      wait_for_change(calls_, seen);
      if (stop_.load(std::memory_order_relaxed)) return;
    }
  }

  bool enter() noexcept {
    std::uint32_t door = door_.load(std::memory_order_relaxed);
    while ((door & kOpen) != 0) {
      if (door_.compare_exchange_weak(door, door + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void take_items(int worker) noexcept {
    for (;;) {
      const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= work_.n_items) return;
      work_.call(work_.target, item, worker);
    }
  }

  const std::uint64_t generation_ = fork_generation();
  Work work_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> busy_{false};
  // Each on a cache line of its own: sleepers read calls_ while workers fight for next_.
  alignas(64) std::atomic<std::uint32_t> calls_{0};
  alignas(64) std::atomic<std::uint32_t> door_{0};
  alignas(64) std::atomic<std::int64_t> next_{0};
  std::vector<std::thread> threads_;
};

int available_processors() noexcept {
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

namespace {

int checked_threads(int n_threads) {
  if (n_threads < 0 || n_threads > WorkerPool::kMaxThreads) {
    throw InvalidArgument("[WorkerPool] n_threads must be in 0.." +
                          std::to_string(WorkerPool::kMaxThreads) + ", got " +
                          std::to_string(n_threads));
  }
  return n_threads == 0 ? std::min(available_processors(), WorkerPool::kMaxThreads) : n_threads;
}

}  // namespace

WorkerPool::WorkerPool(int n_threads) : n_threads_(checked_threads(n_threads)) {}

WorkerPool::~WorkerPool() {
  Team* const team = team_.load(std::memory_order_acquire);
  // A parent's threads cannot be joined from its child.
  if (team != nullptr && team->generation() == fork_generation()) delete team;
}

WorkerPool::Team* WorkerPool::team() noexcept {
  Team* current = team_.load(std::memory_order_acquire);
  while (current == nullptr || current->generation() != fork_generation()) {
    // A parent's team is left where it lies: its threads are not here, its state may be half-way.
    auto started = std::unique_ptr<Team>(new (std::nothrow) Team(n_threads_));
    if (started == nullptr) return nullptr;
    if (team_.compare_exchange_strong(current, started.get(), std::memory_order_acq_rel)) {
      return started.release();
    }
  }
  return current;
}

void WorkerPool::run_items(const Work& work) noexcept {
  if (n_threads_ > 1 && work.n_items > 1) {
    Team* const threads = team();
    if (threads != nullptr && threads->try_run(work)) return;
  }
  for (std::int64_t i = 0; i < work.n_items; ++i) work.call(work.target, i, 0);
}

}  // namespace kvpool::kernels
