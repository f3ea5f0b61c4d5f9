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
    for (std::int64_t i = 0; i < n; ++i) state.resolve(kCall, blocks[i], n == 1 ? -1 : i);
    notice.prepare(state.observers, n);
    std::uint32_t owner = kNoOwner;  // of the block before
    for (const BlockHandle& block : blocks) {
      const Reference reference = state.resolve(kCall, block);
      if (reference == kNoReference) continue;  // stale, perhaps by an earlier one of the list
      const std::uint32_t its_owner = state.links(reference).owner;
      if (its_owner != owner && owner != kNoOwner) state.retire_owner(owner);
      owner = its_owner;
      state.drop(reference, notice);
    }
    if (owner != kNoOwner) state.retire_owner(owner);
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
      if (record.shares) {
        state.drop_each(record, notice);
      } else {
        state.hand_over(record, notice);
      }
      state.owners.remove(slot);
    }
    state.history.add(state.stats);
  }
  notice.deliver(&PoolObserver::blocks_freed);
  return dropped;
}

// In the owner's order over both streams: each stream's free list is a stack of its own, so the
// lists may go one after the other.
void BlockPoolAllocator::State::drop_each(OwnerRecord& owner, Notice& notice) noexcept {
  for (OwnerList& held : owner.lists) {
    while (held.head != kNoReference) drop(held.head, notice);
  }
}

// The blocks' records stay as they are; removing the owner is what ends their references.
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
