#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace kvpool::kernels {

/// How many processors this process may run on: its affinity mask where the system has one.
int available_processors() noexcept;

/// Threads that share the items of one piece of work with the thread that calls.
///
/// The threads start at the first run() that wants them. Between runs they spin for some
/// microseconds, then sleep. run() may be called from any thread, also from inside an item: while
/// the threads are busy with one caller's items, another caller does all of its own by itself.
/// Which worker does an item, and when, is left open, so an item's result must not depend on it.
///
/// A child of fork(2) starts threads of its own at its first run(). An item must not fork.
class WorkerPool {
 public:
  static constexpr int kMaxThreads = 1024;

  /// `n_threads` counts the caller: 1 starts no thread, 0 means available_processors(). Throws
  /// InvalidArgument outside 0..kMaxThreads.
  explicit WorkerPool(int n_threads = 0);
  /// Joins the threads. No run() may be under way.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Workers of one run are numbered below this; the caller is 0. Where the system refuses threads
  /// fewer take part.
  int n_threads() const noexcept { return n_threads_; }

  /// Calls item(i, worker) once for each i in [0, n_items) and returns when all are done; what the
  /// items wrote is then seen by the caller. Does not allocate, but for the first run in a process.
  template <typename Item>
  void run(std::int64_t n_items, Item&& item) noexcept {
    static_assert(std::is_nothrow_invocable_v<Item&, std::int64_t, int>,
                  "an item must be noexcept: there is nobody to catch on a worker's thread");
    using Target = std::remove_reference_t<Item>;
    run_items({[](const void* target, std::int64_t i, int worker) noexcept {
                 (*static_cast<Target*>(const_cast<void*>(target)))(i, worker);
               },
               std::addressof(item), n_items});
  }

 private:
  struct Work {
    void (*call)(const void* target, std::int64_t item, int worker) noexcept = nullptr;
    const void* target = nullptr;
    std::int64_t n_items = 0;
  };
  class Team;

  void run_items(const Work& work) noexcept;
  Team* team() noexcept;

  const int n_threads_;
  std::atomic<Team*> team_{nullptr};
};

}  // namespace kvpool::kernels
