// References back, and blocks onto the free lists.
#include "pool_state.h"

namespace kvpool::core {

void BlockPoolAllocator::free(std::span<const BlockHandle> blocks) {
  constexpr const char* kCall = "BlockPoolAllocator::free";
  State& state = *state_;
  Notice notice;
  {
    std::lock_guard guard(state.lock);
    const auto n = static_cast<std::int64_t>(blocks.size());
    const std::uint32_t owner = n == 0 ? kNoOwner : state.owner_of(blocks[0]);
    // A block may have been pinned by the handle of an owner that has left it since.
    const bool unread = state.owners[owner].is_plain() || state.pins.empty();
    if (unread && state.are_alone(blocks, owner)) {
      notice.prepare(state.observers, n);
      if (state.are_all_in_order(blocks, state.owners[owner])) {
        state.drop_all(owner, notice);
      } else {
        state.drop_alone(owner, blocks, notice);
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) state.resolve(kCall, blocks[i], n == 1 ? -1 : i);
      notice.prepare(state.observers, n);
      state.drop_any(blocks, notice);
    }
    state.history.add(state.stats);
  }
  notice.deliver(&PoolObserver::blocks_freed);
}

std::int64_t BlockPoolAllocator::free_all(OwnerId owner) noexcept {
  State& state = *state_;
  Notice notice;
  std::int64_t dropped = 0;
  {
    std::lock_guard guard(state.lock);
    const std::uint32_t slot = state.owners.find(owner);
    if (slot != kNoOwner) {
      OwnerRecord& record = state.owners[slot];
      dropped = record.count();
      notice.prepare(state.observers, dropped);
      state.cancel_reservations(record);
      if (record.is_plain()) {
        state.hand_over(record, notice);
      } else {
        state.drop_each(record, notice);
      }
      state.owners.remove(slot);
    }
    state.history.add(state.stats);
  }
  notice.deliver(&PoolObserver::blocks_freed);
  return dropped;
}

void BlockPoolAllocator::State::drop(Reference reference, Notice& notice) noexcept {
  const std::uint32_t index = record_of(reference);
  BlockRecord& record = blocks[index];
  const int list = list_of(record);
  Links& place = links(reference);
  OwnerRecord& owner = owners[place.owner];
  unlink(owner.lists[list], place);
  if (is_extra(reference)) {
    extras.give_back(slot_of(reference));
  } else {
    place.owner = kNoOwner;
  }
  if (--record.references != 0) return;
  count_fill(owner, record.n_used, -1);
  if (is_pinned(index)) {
    detain(owner, record, notice);
  } else {
    give_back(index, notice);
  }
}

void BlockPoolAllocator::State::detain(const OwnerRecord& owner, const BlockRecord& record,
                                       Notice& notice) noexcept {
  stats.fragmented_count += is_fragmented(record.n_used);
  stats.unused_slot_count += block_size - record.n_used;
  notice.add_detained(owner.id, pin_observers);
}

void BlockPoolAllocator::State::drop_any(std::span<const BlockHandle> handles, Notice& notice) {
  for (const BlockHandle& handle : handles) {
    const Reference reference = resolve("BlockPoolAllocator::free", handle);
    if (reference == kNoReference) continue;  // stale, perhaps by an earlier one of the list
    const std::uint32_t owner = links(reference).owner;
    drop(reference, notice);
    retire_owner(owner);
  }
}

void BlockPoolAllocator::State::drop_alone(std::uint32_t owner_slot,
                                           std::span<const BlockHandle> handles,
                                           Notice& notice) noexcept {
  OwnerRecord& owner = owners[owner_slot];
  std::int64_t freed = 0;
  std::int64_t fragmented = 0;
  std::int64_t used = 0;
  for (const BlockHandle& handle : handles) {
    BlockRecord& record = blocks[handle.record];
    if (record.links.owner == kNoOwner) continue;  // named before
    const int list = list_of(record);
    unlink(owner.lists[list], record.links);
    record.links.owner = kNoOwner;
    fragmented += is_fragmented(record.n_used);
    used += record.n_used;
    ++freed;
    notice.add({BlockId{record.id}, handle.record, record.serial});
    blocks.push(list, handle.record);
  }
  move_gauges(owner, -fragmented, used - freed * block_size);
  stats.n_frees += freed;
  retire_owner(owner_slot);
}

bool BlockPoolAllocator::State::are_all_in_order(std::span<const BlockHandle> handles,
                                                 const OwnerRecord& owner) const noexcept {
  if (owner.shares || static_cast<std::int64_t>(handles.size()) != owner.count()) return false;
  Reference next[BlockTable::kListCount] = {owner.lists[0].head, owner.lists[1].head};
  for (const BlockHandle& handle : handles) {
    const BlockRecord& record = blocks[handle.record];
    Reference& expected = next[list_of(record)];
    if (handle.record != expected) return false;
    expected = record.links.next;
  }
  return true;
}

void BlockPoolAllocator::State::drop_all(std::uint32_t owner_slot, Notice& notice) noexcept {
  OwnerRecord& owner = owners[owner_slot];
  hand_over(owner, notice);
  for (OwnerList& held : owner.lists) {
    held.head = held.tail = kNoReference;
    held.count = 0;
  }
  owner.fragmented = owner.unused_slots = 0;
  owner.first_serial = last_serial + 1;  // ends its references
  retire_owner(owner_slot);
}

// In the owner's order over both streams: each stream's free list is a stack of its own, so the
// lists may go one after the other.
void BlockPoolAllocator::State::drop_each(OwnerRecord& owner, Notice& notice) noexcept {
  for (OwnerList& held : owner.lists) {
    while (held.head != kNoReference) drop(held.head, notice);
  }
}

// The blocks' records stay as they are; raising the owner's first serial, or removing it, is what
// ends their references.
void BlockPoolAllocator::State::hand_over(OwnerRecord& owner, Notice& notice) noexcept {
  for (int list = 0; list < BlockTable::kListCount; ++list) {
    const OwnerList& held = owner.lists[list];
    if (held.count == 0) continue;
    if (notice.wanted()) {
      for (Reference i = held.head; i != kNoReference; i = blocks[i].links.next) {
        notice.add({BlockId{blocks[i].id}, i, blocks[i].serial});
      }
    }
    FreeList& free = blocks.list(list);
    blocks[held.head].links.prev = free.top;
    free.top = held.tail;
    free.count += held.count;
    stats.n_frees += held.count;
  }
  stats.fragmented_count -= owner.fragmented;
  stats.unused_slot_count -= owner.unused_slots;
}

}  // namespace kvpool::core
