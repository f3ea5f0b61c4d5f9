#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "block_record.h"
#include "block_table.h"
#include "format_names.h"
#include "history_ring.h"
#include "kvpool/base/adaptive_lock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/core/block_pool_allocator.h"
#include "notice.h"
#include "owner_table.h"
#include "reference_slab.h"

namespace kvpool::core {

/// How a message of `call` starts.
inline std::string in_call(const char* call) { return std::string("[") + call + "] "; }

/// The books behind a BlockPoolAllocator. Everything below `lock` is guarded by it; methods expect
/// it held. A method either validates, makes room (and may throw) or changes the books (noexcept),
/// and callers go in that order: that is how a failed call has changed nothing.
///
/// Who holds a block: an owner's list of one stream runs through links.prev/next of records and
/// extra references, oldest first; a free list runs through links.prev of records. So an owner that
/// shares nothing gives all its blocks back by hanging its lists on the free lists, whatever their
/// length. A block without references that a reader has pinned is *detained*: on no list, in use.
struct BlockPoolAllocator::State {
  explicit State(PoolConfig pool_config);

  static constexpr OwnerId kFirstMintedOwner = std::numeric_limits<OwnerId>::min();
  static constexpr OwnerId kEndOfMintedOwners = kFirstMintedOwner + (OwnerId{1} << 40);

  // --- names -------------------------------------------------------------------------------------

  /// The free list behind `stream`; throws where the pool has no such stream.
  int list_of(const char* call, Stream stream) const;
  static int list_of(const BlockRecord& record) noexcept {
    return record.stream == Stream::kValue ? 1 : 0;
  }
  Stream stream_of(int list) const noexcept {
    if (!config.separate_kv) return Stream::kShared;
    return list == 0 ? Stream::kKey : Stream::kValue;
  }
  void check_owner(const char* call, const char* argument, OwnerId owner) const;
  void check_format(const char* call, FormatTag format) const;

  // --- references --------------------------------------------------------------------------------

  Links& links(Reference reference) noexcept {
    return is_extra(reference) ? extras[slot_of(reference)].links : blocks[reference].links;
  }
  const Links& links(Reference reference) const noexcept {
    return const_cast<State*>(this)->links(reference);
  }
  std::uint32_t record_of(Reference reference) const noexcept {
    return is_extra(reference) ? extras[slot_of(reference)].record : reference;
  }
  /// Position among its owner's references over both streams.
  std::uint64_t order_of(Reference reference) const noexcept {
    return is_extra(reference) ? extras[slot_of(reference)].order : blocks[reference].serial;
  }
  bool is_live(const BlockRecord& record) const noexcept {
    return record.serial >= owners[record.links.owner].first_serial;
  }
  BlockHandle handle_of(Reference reference) const noexcept;

  /// 0 where `handle` says what `record` says: its latest checkout, live or not.
  std::uint64_t differences(const BlockHandle& handle, const BlockRecord& record) const noexcept {
    return (handle.pool ^ pool_id) | (handle.serial ^ record.serial) |
           (id_and_stream(handle) ^ id_and_stream(record));
  }
  /// The record that `handle` names as the reference of a checkout; blocks.size() or more where it
  /// does not.
  static std::uint64_t checkout_record(const BlockHandle& handle) noexcept {
    return handle.record | std::uint64_t{handle.reference} << 32;
  }
  /// Whether `handle` is the live reference of a checkout: most handles are.
  bool is_plain(const BlockHandle& handle) const noexcept {
    if (checkout_record(handle) >= blocks.size()) return false;
    const BlockRecord& record = blocks[handle.record];
    return differences(handle, record) == 0 && is_live(record);
  }
  /// Whether all are plain, and the one owner in `owner_slot` is alone in referring to them: the
  /// common case of the calls that are made for all layers of a model at once.
  bool are_alone(std::span<const BlockHandle> handles, std::uint32_t owner_slot) const noexcept {
    if (owner_slot == kNoOwner) return false;
    const std::uint32_t size = blocks.size();
    std::uint64_t different = 0;
    std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
    for (const BlockHandle& handle : handles) {
      const std::uint64_t index = checkout_record(handle);
      if (index >= size) return false;
      const BlockRecord& record = blocks[static_cast<std::uint32_t>(index)];
      const std::uint64_t held = record.references | std::uint64_t{record.links.owner} << 32;
      different |= differences(handle, record) | (held ^ (1 | std::uint64_t{owner_slot} << 32));
      oldest = std::min(oldest, record.serial);
    }
    return different == 0 && oldest >= owners[owner_slot].first_serial;
  }
  /// The slot of the owner that `handle` names, kNoOwner where it names nothing.
  std::uint32_t owner_of(const BlockHandle& handle) const noexcept {
    if (handle.reference == 0) {
      return handle.record < blocks.size() ? blocks[handle.record].links.owner : kNoOwner;
    }
    const std::uint32_t slot = handle.reference - 1;
    return slot < extras.size() ? extras[slot].links.owner : kNoOwner;
  }
  /// The live reference behind `handle`, kNoReference for a stale one. Throws for a foreign one,
  /// naming the argument (and its place in a list, where `index` >= 0).
  Reference resolve(const char* call, const BlockHandle& handle, std::int64_t index = -1) const {
    if (is_plain(handle)) return handle.record;
    return resolve_slowly(call, handle, index);
  }
  /// The same where stale handles are refused too.
  Reference resolve_live(const char* call, const BlockHandle& handle,
                         std::int64_t index = -1) const {
    const Reference reference = resolve(call, handle, index);
    if (reference == kNoReference) refuse_stale(call, handle, index);
    return reference;
  }

  void append(OwnerRecord& owner, int list, Reference reference) noexcept {
    OwnerList& held = owner.lists[list];
    Links& place = links(reference);
    place.prev = held.tail;
    place.next = kNoReference;
    (held.tail == kNoReference ? held.head : links(held.tail).next) = reference;
    held.tail = reference;
    ++held.count;
  }
  /// Takes the reference at `place` out of its owner's list.
  void unlink(OwnerList& held, const Links& place) noexcept {
    (place.prev == kNoReference ? held.head : links(place.prev).next) = place.next;
    (place.next == kNoReference ? held.tail : links(place.next).prev) = place.prev;
    --held.count;
  }
  /// Drops a live reference; the block goes back when it was the last and nobody reads it.
  void drop(Reference reference, Notice& notice) noexcept;
  /// Drops live and stale references alike, and owners that need not be kept.
  void drop_any(std::span<const BlockHandle> handles, Notice& notice);
  /// The same for references that are alone (see are_alone) but may be named twice.
  void drop_alone(std::uint32_t owner_slot, std::span<const BlockHandle> handles,
                  Notice& notice) noexcept;
  /// Whether these, known to be alone, are all that an owner has, each stream's in its order: then
  /// drop_all puts them where drop_alone would.
  bool are_all_in_order(std::span<const BlockHandle> handles,
                        const OwnerRecord& owner) const noexcept;
  /// Drops every reference of an owner that shares nothing, at one go.
  void drop_all(std::uint32_t owner_slot, Notice& notice) noexcept;
  /// Drops every reference of `owner` one by one.
  void drop_each(OwnerRecord& owner, Notice& notice) noexcept;
  /// Hands the lists of an owner that shares nothing to the free lists as they are; end its
  /// references next.
  void hand_over(OwnerRecord& owner, Notice& notice) noexcept;
  /// Ends the owner's registration where nothing keeps it.
  void retire_owner(std::uint32_t slot) noexcept {
    if (!owners[slot].needed()) owners.remove(slot);
  }

  // --- readers -----------------------------------------------------------------------------------

  bool is_pinned(std::uint32_t record) const noexcept {
    return record < pins.size() && pins[record] != 0;
  }
  bool is_detained(std::uint32_t record) const noexcept {
    return is_pinned(record) && blocks[record].references == 0;
  }
  /// Puts a block that nobody refers to on its free list; its fill is off the owner's gauges.
  void give_back(std::uint32_t index, Notice& notice) noexcept {
    const BlockRecord& record = blocks[index];
    ++stats.n_frees;
    notice.add({BlockId{record.id}, index, record.serial});
    blocks.push(list_of(record), index);
  }
  /// The owner lost a block that is in use as before.
  void detain(const OwnerRecord& owner, const BlockRecord& record, Notice& notice) noexcept;

  // --- sharing -----------------------------------------------------------------------------------

  /// Which of two lists' heads (kNoReference at the end) comes first in their owner's order.
  bool earlier(Reference a, Reference b) const noexcept {
    return b == kNoReference || (a != kNoReference && order_of(a) < order_of(b));
  }
  /// Make room in `extras` first. The new reference belongs to nobody yet.
  Reference add_extra(std::uint32_t record, std::uint64_t serial, std::uint64_t order) noexcept {
    const std::uint32_t slot = extras.take();
    extras[slot] = {serial, order, record, {}};
    return kExtraBit | slot;
  }
  /// Gives `to` one more reference to a block, at the end of its list.
  Reference share_one(std::uint32_t record, int list, std::uint32_t to,
                      std::uint64_t order) noexcept {
    const Reference copy = add_extra(record, ++last_serial, order);
    extras[slot_of(copy)].links.owner = to;
    append(owners[to], list, copy);
    ++blocks[record].references;
    return copy;
  }
  /// Gives `to` a reference to each block of `from`, in order; out.size() is their number.
  void share_each(std::uint32_t from, std::uint32_t to, std::span<BlockHandle> out) noexcept;
  /// Puts a fresh block in the place of `shared`, a reference to a block that others refer to too;
  /// the block and room for an extra reference are there.
  Reference copy_on_write(Reference shared) noexcept;
  /// Puts `copy` in the place of `shared`, which ends.
  void replace(OwnerRecord& owner, int list, Reference shared, Reference copy) noexcept;

  // --- taking blocks -----------------------------------------------------------------------------

  /// Blocks wanted, and to be minted, of each list.
  struct Demand {
    std::int64_t blocks[BlockTable::kListCount] = {};
  };
  /// Blocks that the pool may still grow by.
  std::int64_t headroom() const noexcept;
  /// Free blocks of the list that are not reserved by others.
  std::int64_t free_for(int list, std::uint32_t owner_slot) const noexcept {
    const FreeList& free = blocks.list(list);
    return free.count - free.reserved + owners[owner_slot].lists[list].reserved;
  }
  /// Decides, changing nothing, whether `owner` can have `wanted` (its reservation counted in), and
  /// what must be minted.
  std::optional<Shortage> plan(OwnerId owner, std::uint32_t owner_slot, const Demand& wanted,
                               Demand& to_mint) const noexcept;
  void make_room(const Demand& to_mint) { blocks.make_room(to_mint.blocks[0] + to_mint.blocks[1]); }
  void mint(const Demand& to_mint) noexcept;
  /// The whole of an allocation or reservation but its last part: on success there are enough free
  /// blocks and `owner_slot` names the (active) owner; a shortage is on the books.
  std::optional<Shortage> obtain(OwnerId owner, const Demand& wanted, std::uint32_t& owner_slot);
  /// The slot of `owner`, active from now on; make room in `owners` first.
  std::uint32_t activate(OwnerId owner) noexcept {
    const std::uint32_t slot = owners.find(owner);
    return slot != kNoOwner ? slot : owners.add(owner, last_serial + 1);
  }
  void check_out(BlockRecord& record, std::uint64_t serial, FormatTag format,
                 std::uint32_t n_used) noexcept {
    record.serial = serial;
    record.references = 1;
    record.n_used = n_used;
    record.format = static_cast<std::uint16_t>(format);
    record.ever_allocated = true;
  }
  /// Takes the top block of the list; the reference of its checkout is nobody's.
  std::uint32_t take_unowned(int list, FormatTag format, std::uint32_t n_used) noexcept;
  /// The shape of a request: `copies` runs of `length` blocks, each full but for its last one.
  struct Runs {
    std::int64_t length;
    std::int64_t copies;
    std::int64_t total;  // blocks of all runs; capped where no pool could have so many
    std::uint32_t last_used;
  };
  Runs check_runs(const char* call, std::int64_t n_tokens, std::int64_t copies) const;
  /// Takes runs.total blocks, the size of `out`.
  void take_runs(int list, std::uint32_t owner_slot, FormatTag format, const Runs& runs,
                 std::span<BlockHandle> out) noexcept;
  void set_reserved(OwnerRecord& owner, int list, std::int64_t n) noexcept {
    blocks.list(list).reserved += n - owner.lists[list].reserved;
    owner.lists[list].reserved = static_cast<std::uint32_t>(n);
  }
  void cancel_reservations(OwnerRecord& owner) noexcept {
    for (int list = 0; list < BlockTable::kListCount; ++list) set_reserved(owner, list, 0);
  }
  void use_reserved(OwnerRecord& owner, int list, std::int64_t taken) noexcept {
    if (const std::int64_t reserved = owner.lists[list].reserved) {
      set_reserved(owner, list, std::max<std::int64_t>(reserved - taken, 0));
    }
  }

  // --- fill --------------------------------------------------------------------------------------

  bool is_fragmented(std::uint32_t n_used) const noexcept {
    return n_used - 1 < block_size - 1;  // not 0 and not full, in one unsigned comparison
  }
  /// Adds `n` blocks of this fill (or takes them out, n < 0) to the gauges of the pool and of
  /// `owner`.
  void count_fill(OwnerRecord& owner, std::uint32_t n_used, std::int64_t n) noexcept {
    move_gauges(owner, is_fragmented(n_used) ? n : 0, n * (block_size - n_used));
  }
  void move_gauges(OwnerRecord& owner, std::int64_t fragmented, std::int64_t unused) noexcept {
    owner.fragmented += fragmented;
    owner.unused_slots += unused;
    stats.fragmented_count += fragmented;
    stats.unused_slot_count += unused;
  }
  /// Sets the fill of blocks whose live handles all belong to `owner`.
  void fill_each(OwnerRecord& owner, std::span<const BlockHandle> handles,
                 std::uint32_t n_used) noexcept;
  void note_exhausted() noexcept {
    ++stats.n_exhausted;
    history.add(stats);
  }
  void note_peak() noexcept {
    stats.peak_blocks_in_use = std::max(stats.peak_blocks_in_use, stats.blocks_in_use());
  }

  [[noreturn]] static void refuse_shared(const char* call, const BlockHandle& handle,
                                         std::int64_t index);
  void check_invariants() const;

  const PoolConfig config;
  const std::uint32_t block_size;

  alignas(64) mutable AdaptiveLock lock;
  // On a line of its own: waiters read the lock while its holder writes what follows.
  alignas(64) AllocationStats stats;
  std::uint64_t pool_id = 0;
  std::uint64_t last_serial = 0;
  BlockTable blocks;
  OwnerTable owners;
  ReferenceSlab extras;
  std::vector<std::uint32_t> pins;                // by record; as long as the last pin wanted it
  std::shared_ptr<const ObserverList> observers;  // null where there are none
  std::shared_ptr<const PinObserverList> pin_observers;
  OwnerId next_minted_owner = kFirstMintedOwner;
  FormatNames formats;
  HistoryRing<kHistorySize> history;
  // Last: from here on fork may take the lock.
  ForkGuard fork_guard{lock};

 private:
  class Audit;

  Reference resolve_slowly(const char* call, const BlockHandle& handle, std::int64_t index) const;
  [[noreturn]] static void refuse(const char* call, const BlockHandle& handle, std::int64_t index,
                                  const std::string& why);
  [[noreturn]] static void refuse_stale(const char* call, const BlockHandle& handle,
                                        std::int64_t index);
};

}  // namespace kvpool::core
