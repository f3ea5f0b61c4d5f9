// More than one reference to a block.
#include "pool_state.h"

namespace kvpool::core {

std::vector<BlockHandle> BlockPoolAllocator::fork(OwnerId owner, OwnerId new_owner) {
  constexpr const char* kCall = "BlockPoolAllocator::fork";
  State& state = *state_;
  std::vector<BlockHandle> handles;
  std::int64_t n = 0;
  for (;;) {  // memory for the handles is asked for outside the lock
    handles.resize(static_cast<std::size_t>(n));
    std::lock_guard guard(state.lock);
    state.check_owner(kCall, "new_owner", new_owner);
    if (const std::int64_t held = state.owners[state.owners.find(new_owner)].count()) {
      throw InvalidArgument(in_call(kCall) + "new_owner must hold no blocks, but " +
                            std::to_string(new_owner) + " holds " + std::to_string(held));
    }
    const std::uint32_t from = state.owners.find(owner);
    n = state.owners[from].count();
    if (handles.size() != static_cast<std::size_t>(n)) continue;
    if (n == 0) return handles;
    state.extras.make_room(n);
    state.owners.make_room();
    const std::uint32_t to = state.activate(new_owner);
    state.owners[from].shares = state.owners[to].shares = true;
    state.share_each(from, to, handles);
    return handles;
  }
}

void BlockPoolAllocator::State::share_each(std::uint32_t from, std::uint32_t to,
                                           std::span<BlockHandle> out) noexcept {
  Reference heads[BlockTable::kListCount] = {owners[from].lists[0].head,
                                             owners[from].lists[1].head};
  for (BlockHandle& handle : out) {
    const int list = earlier(heads[0], heads[1]) ? 0 : 1;
    const Reference source = heads[list];
    heads[list] = links(source).next;
    handle = handle_of(share_one(record_of(source), list, to, order_of(source)));
  }
}

void BlockPoolAllocator::share(std::span<const BlockHandle> blocks, OwnerId owner,
                               std::span<BlockHandle> out) {
  constexpr const char* kCall = "BlockPoolAllocator::share";
  State& state = *state_;
  if (out.size() != blocks.size()) {
    throw InvalidArgument(in_call(kCall) + "out must hold " + std::to_string(blocks.size()) +
                          " handles, got " + std::to_string(out.size()));
  }
  if (blocks.empty()) return;
  const auto n = static_cast<std::int64_t>(blocks.size());
  std::lock_guard guard(state.lock);
  state.check_owner(kCall, "owner", owner);
  for (std::int64_t i = 0; i < n; ++i) state.resolve_live(kCall, blocks[i], n == 1 ? -1 : i);
  state.extras.make_room(n);
  state.owners.make_room();
  const std::uint32_t to = state.activate(owner);
  state.owners[to].shares = true;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t record = blocks[i].record;
    state.owners[state.owner_of(blocks[i])].shares = true;
    const int list = State::list_of(state.blocks[record]);
    out[i] = state.handle_of(state.share_one(record, list, to, state.last_serial + 1));
  }
}

std::optional<Shortage> BlockPoolAllocator::try_writable(const BlockHandle& block,
                                                         BlockHandle& out) {
  return try_writable(std::span(&block, 1), std::span(&out, 1));
}

std::optional<Shortage> BlockPoolAllocator::try_writable(std::span<const BlockHandle> blocks,
                                                         std::span<BlockHandle> out) {
  constexpr const char* kCall = "BlockPoolAllocator::writable";
  State& state = *state_;
  if (out.size() != blocks.size()) {
    throw InvalidArgument(in_call(kCall) + "out must hold " + std::to_string(blocks.size()) +
                          " handles, got " + std::to_string(out.size()));
  }
  const auto n = static_cast<std::int64_t>(blocks.size());
  std::lock_guard guard(state.lock);
  State::Demand wanted;
  std::uint32_t slot = kNoOwner;
  std::int64_t n_shared = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const Reference reference = state.resolve_live(kCall, blocks[i], n == 1 ? -1 : i);
    const std::uint32_t holder = state.links(reference).owner;
    if ((i > 0 && holder != slot) || std::ranges::count(blocks.first(i), blocks[i]) != 0) {
      throw InvalidArgument(in_call(kCall) + "blocks must be one owner's, each named once");
    }
    slot = holder;
    if (state.blocks[blocks[i].record].references == 1) continue;
    ++wanted.blocks[State::list_of(state.blocks[blocks[i].record])];
    ++n_shared;
  }
  if (n_shared > 0) {
    state.extras.make_room(n_shared);
    if (auto shortage = state.obtain(state.owners[slot].id, wanted, slot)) return shortage;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const bool alone = state.blocks[blocks[i].record].references == 1;
    const BlockHandle own =
        alone ? blocks[i] : state.handle_of(state.copy_on_write(state.resolve(kCall, blocks[i])));
    out[i] = own;  // which may be blocks[i]
  }
  if (n_shared > 0) {
    state.note_peak();
    state.history.add(state.stats);
  }
  return std::nullopt;
}

Reference BlockPoolAllocator::State::copy_on_write(Reference shared) noexcept {
  const std::uint32_t index = record_of(shared);
  OwnerRecord& owner = owners[links(shared).owner];
  const BlockRecord& source = blocks[index];
  const int list = list_of(source);
  const std::uint32_t fresh = take_unowned(list, FormatTag{source.format}, source.n_used);
  const Reference copy = add_extra(fresh, last_serial, order_of(shared));
  replace(owner, list, shared, copy);
  --blocks[index].references;
  count_fill(owner, source.n_used, +1);
  use_reserved(owner, list, 1);
  return copy;
}

// The copy is an extra reference because it needs an order of its own: its block's serial is that
// of a later checkout than its place in the list says.
void BlockPoolAllocator::State::replace(OwnerRecord& owner, int list, Reference shared,
                                        Reference copy) noexcept {
  Links& from = links(shared);
  Links& to = links(copy);
  to = from;
  OwnerList& held = owner.lists[list];
  (to.prev == kNoReference ? held.head : links(to.prev).next) = copy;
  (to.next == kNoReference ? held.tail : links(to.next).prev) = copy;
  if (is_extra(shared)) {
    extras.give_back(slot_of(shared));
  } else {
    from.owner = kNoOwner;
  }
}

}  // namespace kvpool::core
