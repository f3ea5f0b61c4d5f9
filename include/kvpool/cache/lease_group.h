#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/base/ids.h"
#include "kvpool/cache/buffer_growth.h"
#include "kvpool/cache/group_step.h"
#include "kvpool/cache/step_reservation.h"
#include "kvpool/cache/token_lease.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::cache {

/// The layers of one request, which move together. Each is held through a LayerLease.
///
/// A step appends the same tokens to each layer in turn. What its growth takes in all layers is
/// reserved when the first layer moves, so that running out moves none:
///
///   at rest --first append--> in step, some layers moved --last commit--> at rest
///                                 |                                          ^
///                                 +--- moved layers undone, then end_step ---+
///
/// A step that was cut short by an exception is *torn*: a layer moved and its buffers were never
/// written, or the layers at the end of the list have not moved when one that has moved starts the
/// next step. A layer that never moves while a later one does (the caller leaves it out) does not
/// make a step torn.
///
/// Thread-safe; the group's lock is taken before the pool's.
class LeaseGroup {
 public:
  using Pool = core::BlockPoolAllocator;

  /// Without a pool (nullptr) nothing is charged: the layers of a cache that was loaded from a file
  /// and not attached yet.
  LeaseGroup(std::shared_ptr<Pool> pool, OwnerId owner);
  ~LeaseGroup();
  LeaseGroup(const LeaseGroup&) = delete;
  LeaseGroup& operator=(const LeaseGroup&) = delete;

  const std::shared_ptr<Pool>& pool() const noexcept { return pool_; }
  OwnerId owner() const noexcept { return owner_; }
  std::int64_t n_layers() const;
  /// Blocks held by all layers, keys and values together.
  std::int64_t n_blocks() const;

  /// Reserves `pairs` pairs of blocks for replacements of the layers' buffers to come, until the
  /// next step or end_step(). Throws StepExhausted, whose message starts with `call`.
  void prepare(std::int64_t pairs, const char* call);
  /// Whether the pool has `pairs` more pairs of blocks for the owner, growth left aside. A guess:
  /// other owners may come in between.
  bool has_at_hand(std::int64_t pairs) const;
  /// Pairs of blocks that `batch` sequences of `rows` rows take.
  std::int64_t pairs_for(std::int64_t batch, std::int64_t rows) const noexcept;
  /// Ends the step under way, if any, and cancels what is left of its reservation. Layers stay
  /// where they are: undo those that moved first.
  void end_step();
  /// Gives back every layer's blocks; all are empty afterwards.
  void release() noexcept;

  /// Throws Error where a book does not add up. For tests.
  void check_invariants() const;

 private:
  friend class LayerLease;

  struct Layer {
    Layer(std::shared_ptr<Pool> pool, OwnerId owner, const BufferGrowth& how)
        : lease(std::move(pool), owner), growth(how) {}

    TokenLease lease;
    BufferGrowth growth;
    BufferShape now;
    /// Where it was before the step under way, or before the last one.
    BufferShape before;
    bool moved = false;
    bool trimmed = false;
  };

  // All below: with mutex_ held.
  bool torn_before(const Layer& layer) const noexcept;
  bool torn() const noexcept;
  void plan_step(std::int64_t batch, std::int64_t n_tokens);
  void open_step() noexcept;
  void close_step() noexcept;
  void close_step_if_complete() noexcept;
  std::int64_t pairs_needed(std::int64_t batch, std::int64_t n_tokens, int halvings) const;
  std::int64_t pairs_to_follow(std::int64_t batch, std::int64_t n_tokens) const;
  std::int64_t pairs_needed_tightened(std::int64_t batch, std::int64_t n_tokens) const;
  bool has_room_for(std::int64_t pairs) const;
  [[noreturn]] void throw_exhausted(const core::Shortage& shortage, std::int64_t batch,
                                    std::int64_t n_tokens) const;

  const std::shared_ptr<Pool> pool_;
  const OwnerId owner_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Layer>> layers_;  // in the order a step visits them
  bool in_step_ = false;
  /// The layer that has moved and whose buffers do not show it yet.
  const Layer* writing_ = nullptr;
  int halvings_ = 0;
  StepReservation reservation_;
  TrimRound trim_round_;
};

}  // namespace kvpool::cache
