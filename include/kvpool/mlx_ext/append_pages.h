#pragma once

#include <mlx/primitives.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kvpool/cache/append_plan.h"

namespace kvpool::mlx_ext {

/// One append on its way through MLX's graph.
///
///   built --evaluation reaches it--> scheduled: the plan runs on the stream, in order
///     |
///     +--the cache gives it up-----> withdrawn: what else the plan moves was moved without its
///                                    rows, and an evaluation that reaches it fails
class Append {
 public:
  explicit Append(std::shared_ptr<const cache::AppendPlan> plan) : plan_(std::move(plan)) {}

  const std::shared_ptr<const cache::AppendPlan>& plan() const noexcept { return plan_; }
  bool is_scheduled() const noexcept { return state_.load() == State::kScheduled; }
  /// False where the append went the other way before.
  bool schedule() noexcept { return leave(State::kScheduled); }
  /// The same for an evaluation: throws Error where it went the other way.
  void claim();
  /// The same for a cache, which forks may have done before.
  bool withdraw() noexcept { return leave(State::kWithdrawn) || !is_scheduled(); }
  /// AppendPlan::run_without_rows for whoever of a cache and its forks comes first; the others wait
  /// for it.
  void run_without_rows() {
    std::call_once(without_rows_, [this] { plan_->run_without_rows(); });
  }

 private:
  enum class State { kBuilt, kScheduled, kWithdrawn };

  bool leave(State to) noexcept {
    State from = State::kBuilt;
    return state_.compare_exchange_strong(from, to);
  }

  std::shared_ptr<const cache::AppendPlan> plan_;
  std::atomic<State> state_{State::kBuilt};
  std::once_flag without_rows_;
};

/// Writes tokens into pages. Inputs: the order token, keys [sequences, heads, tokens, key_dim] and
/// values, with any strides; the first tokens of one of the sequences are appended. Output: the
/// order token again, in the same memory. Who takes that as an input runs after the append, so the
/// appends to one sequence are a chain.
class AppendPages : public mlx::core::UnaryPrimitive {
 public:
  AppendPages(mlx::core::Stream stream, std::shared_ptr<Append> append, std::int64_t sequence)
      : UnaryPrimitive(stream), append_(std::move(append)), sequence_(sequence) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& token) override;
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& token) override;
  const char* name() const override { return "AppendPages"; }

 private:
  std::shared_ptr<Append> append_;
  std::int64_t sequence_;
};

/// Stands in for an append that was withdrawn: moves what its plan moves besides the rows. Input
/// and output: the order token.
class SkipAppend : public mlx::core::UnaryPrimitive {
 public:
  SkipAppend(mlx::core::Stream stream, std::shared_ptr<Append> append)
      : UnaryPrimitive(stream), append_(std::move(append)) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& token) override;
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& token) override;
  const char* name() const override { return "SkipAppend"; }

 private:
  std::shared_ptr<Append> append_;
};

}  // namespace kvpool::mlx_ext
