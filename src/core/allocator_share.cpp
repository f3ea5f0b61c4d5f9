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
    const Reference copy = add_extra(record_of(source), ++last_serial, order_of(source));
    links(copy).owner = to;
    append(owners[to], list, copy);
    ++blocks[record_of(source)].references;
    handle = handle_of(copy);
  }
}

std::optional<Shortage> BlockPoolAllocator::try_writable(const BlockHandle& block,
                                                         BlockHandle& out) {
  constexpr const char* kCall = "BlockPoolAllocator::writable";
  State& state = *state_;
  std::lock_guard guard(state.lock);
  const Reference shared = state.resolve_live(kCall, block);
  const std::uint32_t index = block.record;
  if (state.blocks[index].references == 1) {
    out = block;
    return std::nullopt;
  }
  std::uint32_t slot = state.links(shared).owner;
  const int list = state.list_of(kCall, block.stream);
  State::Demand wanted;
  wanted.blocks[list] = 1;
  state.extras.make_room(1);
  if (auto shortage = state.obtain(state.owners[slot].id, wanted, slot)) return shortage;

  OwnerRecord& owner = state.owners[slot];
  const BlockRecord& source = state.blocks[index];
  const std::uint32_t fresh = state.take_unowned(list, FormatTag{source.format}, source.n_used);
  const Reference copy = state.add_extra(fresh, state.last_serial, state.order_of(shared));
  state.replace(owner, list, shared, copy);
  --state.blocks[index].references;
  state.count_fill(owner, source.n_used, +1);
  state.use_reserved(owner, list, 1);
  state.note_peak();
  state.history.add(state.stats);
  out = state.handle_of(copy);
  return std::nullopt;
}

Reference BlockPoolAllocator::State::add_extra(std::uint32_t record, std::uint64_t serial,
                                               std::uint64_t order) noexcept {
  const std::uint32_t slot = extras.take();
  extras[slot] = {serial, order, record, {}};
  return kExtraBit | slot;
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
