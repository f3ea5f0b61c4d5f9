#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/adaptive_lock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/base/ids.h"
#include "kvpool/cache/group_step.h"
#include "kvpool/cache/paged_pool.h"
#include "kvpool/cache/step_reservation.h"
#include "kvpool/cache/stream_format.h"
#include "kvpool/core/shortage.h"
#include "kvpool/storage/page_store.h"

namespace kvpool::cache {

class PagedLayer;

/// The layers of one request, which move together. Each is held through its PagedLayer.
///
/// A step appends the same tokens to each layer in turn. What that takes in all layers, blocks and
/// bytes, is reserved when the first layer moves, so that running out moves none:
///
///   at rest --first append--> in step, some layers moved --last append--> at rest
///                                 |                                          ^
///                                 +---------- rolled back -------------------+
///
/// A step that was cut short by an exception is *torn*: the layers at the end of the list have not
/// moved when one that has moved starts the next step. That append rolls the moved layers back
/// first. A layer that never moves while a later one does (the caller leaves it out) does not make
/// a step torn.
///
/// Thread-safe, its layers too; the group's lock is taken before the pool's.
class PagedGroup : public std::enable_shared_from_this<PagedGroup> {
 public:
  /// Throws InvalidArgument where `pool` is null.
  PagedGroup(std::shared_ptr<PagedPool> pool, OwnerId owner);
  ~PagedGroup();
  PagedGroup(const PagedGroup&) = delete;
  PagedGroup& operator=(const PagedGroup&) = delete;

  const std::shared_ptr<PagedPool>& pool() const noexcept { return pool_; }
  OwnerId owner() const noexcept { return owner_; }
  std::int64_t n_layers() const;
  /// Blocks held by all layers, keys and values together.
  std::int64_t n_blocks() const;
  /// Bytes of their pages.
  std::int64_t nbytes() const;

  /// A new, empty layer behind those that the group has; it keeps the group alive. Throws
  /// InvalidArgument where `spec` is out of range.
  std::unique_ptr<PagedLayer> add_layer(const PagedLayerSpec& spec);

  /// A copy of every layer, in order, in a new group of `owner` (which may be this one's), or of a
  /// new owner of the pool. Full and partial blocks are shared; no bytes are copied and no block is
  /// taken. The layers keep the new group. Throws LeaseLost.
  std::vector<std::unique_ptr<PagedLayer>> fork(std::optional<OwnerId> owner = std::nullopt);

  /// Takes the step under way back, if any: every layer that moved is where it was before it.
  void roll_back_step();
  /// Gives back every layer's blocks; all are empty afterwards.
  void release() noexcept;

  /// Throws Error where a book does not add up. For tests.
  void check_invariants() const;

 private:
  friend class GroupRegistry;
  friend class PagedLayer;

  /// Slots of one size that were taken for layers of this step which have not moved yet.
  struct Purse {
    std::int64_t page_bytes = 0;
    std::vector<storage::SlotRef> slots;
  };
  /// What n tokens take in all layers.
  struct Demand {
    std::int64_t pairs = 0;
    /// (page_bytes, slots)
    std::vector<std::pair<std::int64_t, std::int64_t>> slots;
    /// A block that is not the layer's alone is copied: more than one call of the allocator.
    bool copies = false;

    void add_slots(std::int64_t page_bytes, std::int64_t n);
  };

  /// Takes back the pins that tables keep for views to come where the owner's blocks were freed.
  /// Does nothing where the lock is held: whoever holds it finds the loss.
  void give_up_pins_if_lost() noexcept;

  // All below: with lock_ held.
  bool torn() const noexcept;
  Demand demand(std::int64_t n_tokens) const;
  bool fits(std::int64_t n_tokens) const;
  void plan_step(std::int64_t n_tokens);
  /// Where a step does not fit, gives back what its queries will not see: a window keeps what the
  /// step before saw until the next one has moved. That one can be rolled back no more.
  void make_room_behind_windows(std::int64_t n_tokens);
  void open_step() noexcept;
  void close_step() noexcept;
  void close_step_if_complete() noexcept;
  void undo_step();
  [[nodiscard]] std::optional<storage::ByteShortage> take_slots(std::int64_t page_bytes,
                                                                std::span<storage::SlotRef> out);
  [[noreturn]] void throw_exhausted(const core::Shortage& shortage, std::int64_t n_tokens);
  [[noreturn]] void throw_exhausted(const storage::ByteShortage& shortage, std::int64_t n_tokens);
  std::int64_t less_that_fits(std::int64_t n_tokens) const;

  const std::shared_ptr<PagedPool> pool_;
  const OwnerId owner_;
  mutable AdaptiveLock lock_;
  std::vector<PagedLayer*> layers_;  // in the order a step visits them
  std::int64_t n_moved_ = 0;
  bool in_step_ = false;
  StepReservation reservation_;
  std::vector<Purse> purse_;
  TrimRound trim_round_;
  // Last: from here on fork(2) may take the lock.
  ForkGuard fork_guard_{lock_, 3};
};

}  // namespace kvpool::cache
