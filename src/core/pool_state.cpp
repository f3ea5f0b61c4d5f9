#include "pool_state.h"

namespace kvpool::core {

namespace {

/// `block 7` or `blocks[3] (id 7)`.
std::string named(const BlockHandle& handle, std::int64_t index) {
  const std::string id = std::to_string(value(handle.id));
  return index < 0 ? "block " + id : "blocks[" + std::to_string(index) + "] (id " + id + ")";
}

}  // namespace

BlockPoolAllocator::State::State(PoolConfig pool_config)
    : config(pool_config), block_size(static_cast<std::uint32_t>(pool_config.block_size)) {
  pool_id = fork_guard.id();
  Demand initial;
  initial.blocks[0] = config.separate_kv ? (config.n_blocks + 1) / 2 : config.n_blocks;
  initial.blocks[1] = config.n_blocks - initial.blocks[0];
  make_room(initial);
  for (int list = 0; list < BlockTable::kListCount; ++list) {
    blocks.mint(list, stream_of(list), initial.blocks[list]);
  }
  stats.n_blocks = config.n_blocks;
}

int BlockPoolAllocator::State::list_of(const char* call, Stream stream) const {
  if (!config.separate_kv || stream == Stream::kKey) return 0;
  if (stream == Stream::kValue) return 1;
  throw InvalidArgument(in_call(call) + "stream must be k or v in a pool with separate_kv, got " +
                        (stream == Stream::kShared ? std::string(name(stream))
                                                   : std::to_string(static_cast<int>(stream))));
}

void BlockPoolAllocator::State::check_owner(const char* call, const char* argument,
                                            OwnerId owner) const {
  if (owner >= next_minted_owner && owner < kEndOfMintedOwners) {
    throw InvalidArgument(in_call(call) + argument + " " + std::to_string(owner) +
                          " is kept for new_owner(), which has not returned it");
  }
}

void BlockPoolAllocator::State::check_format(const char* call, FormatTag format) const {
  if (!formats.contains(format)) {
    throw InvalidArgument(in_call(call) + "format must be a tag of this pool, got " +
                          std::to_string(static_cast<std::uint16_t>(format)));
  }
}

BlockHandle BlockPoolAllocator::State::handle_of(Reference reference) const noexcept {
  const std::uint32_t index = record_of(reference);
  const BlockRecord& record = blocks[index];
  BlockHandle handle{pool_id, record.serial, index, 0, BlockId{record.id}, record.stream};
  if (is_extra(reference)) {
    handle.serial = extras[slot_of(reference)].serial;
    handle.reference = 1 + slot_of(reference);
  }
  return handle;
}

void BlockPoolAllocator::State::refuse(const char* call, const BlockHandle& handle,
                                       std::int64_t index, const std::string& why) {
  throw InvalidArgument(in_call(call) + named(handle, index) + " " + why);
}

void BlockPoolAllocator::State::refuse_stale(const char* call, const BlockHandle& handle,
                                             std::int64_t index) {
  refuse(call, handle, index, "is stale: it was given back to the pool");
}

void BlockPoolAllocator::State::refuse_shared(const char* call, const BlockHandle& handle,
                                              std::int64_t index) {
  refuse(call, handle, index, "has more than one reference: make it writable first");
}

// Serials rise from checkout to checkout of a record and of a slot, so a serial above the one
// written there was never issued for it, and one below belongs to a reference that has ended.
Reference BlockPoolAllocator::State::resolve_slowly(const char* call, const BlockHandle& handle,
                                                    std::int64_t index) const {
  if (handle.pool != pool_id) {
    refuse(call, handle, index,
           "of pool " + std::to_string(handle.pool) + " is not a block of this pool, " +
               std::to_string(pool_id));
  }
  const auto refuse_made = [&] {
    refuse(call, handle, index,
           "with serial " + std::to_string(handle.serial) + " was never handed out by this pool");
  };
  if (handle.serial == 0 || handle.serial > last_serial || handle.record >= blocks.size()) {
    refuse_made();
  }
  const BlockRecord& record = blocks[handle.record];
  // An earlier id is possible where the record has had one; a later one never.
  const bool same_id = value(handle.id) == record.id && handle.stream == record.stream;
  const bool earlier_id = record.recycled && value(handle.id) < record.id;
  if (!same_id && !earlier_id) refuse_made();

  if (handle.reference == 0) {
    if (handle.serial > record.serial) refuse_made();
    if (handle.serial < record.serial || !is_live(record)) return kNoReference;
    if (!same_id) refuse_made();
    return handle.record;
  }
  const std::uint32_t slot = handle.reference - 1;
  if (slot >= extras.size()) refuse_made();
  const ExtraReference& extra = extras[slot];
  if (handle.serial > extra.serial) refuse_made();
  if (handle.serial < extra.serial) return kNoReference;
  if (handle.record != extra.record) refuse_made();
  if (extra.links.owner == kNoOwner) return kNoReference;
  if (!same_id) refuse_made();
  return kExtraBit | slot;
}

std::int64_t BlockPoolAllocator::State::headroom() const noexcept {
  if (!config.grow_on_exhaustion) return 0;
  std::int64_t room = blocks.mintable();
  if (config.max_blocks) room = std::min(room, *config.max_blocks - blocks.managed());
  return std::max<std::int64_t>(room, 0);
}

std::optional<Shortage> BlockPoolAllocator::State::plan(OwnerId owner, std::uint32_t owner_slot,
                                                        const Demand& wanted,
                                                        Demand& to_mint) const noexcept {
  std::int64_t room = headroom();
  for (int list = 0; list < BlockTable::kListCount; ++list) {
    const std::int64_t free = free_for(list, owner_slot);
    const std::int64_t missing = std::max<std::int64_t>(wanted.blocks[list] - free, 0);
    if (missing > room) {
      return Shortage{stream_of(list), owner, wanted.blocks[list], free + room,
                      blocks.list(list).managed};
    }
    room -= missing;
    to_mint.blocks[list] = missing;
  }
  return std::nullopt;
}

void BlockPoolAllocator::State::mint(const Demand& to_mint) noexcept {
  for (int list = 0; list < BlockTable::kListCount; ++list) {
    if (const std::int64_t n = to_mint.blocks[list]) {
      blocks.mint(list, stream_of(list), n);
      stats.n_blocks += n;
      stats.n_grown += n;
    }
  }
}

std::optional<Shortage> BlockPoolAllocator::State::obtain(OwnerId owner, const Demand& wanted,
                                                          std::uint32_t& owner_slot) {
  owner_slot = owners.find(owner);
  Demand to_mint;
  const bool covered =
      wanted.blocks[0] <= free_for(0, owner_slot) && wanted.blocks[1] <= free_for(1, owner_slot);
  if (!covered) {
    if (auto shortage = plan(owner, owner_slot, wanted, to_mint)) {
      note_exhausted();
      return shortage;
    }
    make_room(to_mint);
  }
  if (owner_slot == kNoOwner) {
    owners.make_room();
    owner_slot = owners.add(owner, last_serial + 1);
  }
  if (!covered) mint(to_mint);
  return std::nullopt;
}

std::uint32_t BlockPoolAllocator::State::take_unowned(int list, FormatTag format,
                                                      std::uint32_t n_used) noexcept {
  FreeList& free = blocks.list(list);
  const std::uint32_t index = free.top;
  BlockRecord& record = blocks[index];
  free.top = record.links.prev;
  --free.count;
  stats.n_reused += record.ever_allocated;
  ++stats.n_allocations;
  check_out(record, ++last_serial, format, n_used);
  record.links.owner = kNoOwner;
  return index;
}

// What lies below a block on the free list is what comes after it in the owner's list, so each
// record is written once.
void BlockPoolAllocator::State::take_runs(int list, std::uint32_t owner_slot, FormatTag format,
                                          const Runs& runs, std::span<BlockHandle> out) noexcept {
  OwnerRecord& owner = owners[owner_slot];
  OwnerList& held = owner.lists[list];
  FreeList& free = blocks.list(list);
  const Stream stream = stream_of(list);
  std::uint32_t index = free.top;
  Reference prev = held.tail;
  (prev == kNoReference ? held.head : links(prev).next) = index;
  std::uint64_t serial = last_serial;
  std::int64_t reused = 0;
  std::int64_t left = runs.length;
  for (BlockHandle& handle : out) {
    BlockRecord& record = blocks[index];
    const std::uint32_t next = record.links.prev;
    record.links = {owner_slot, prev, next};
    reused += record.ever_allocated;
    const bool last = --left == 0;
    if (last) left = runs.length;
    check_out(record, ++serial, format, last ? runs.last_used : block_size);
    handle = BlockHandle{pool_id, serial, index, 0, BlockId{record.id}, stream};
    prev = index;
    index = next;
  }
  blocks[prev].links.next = kNoReference;
  held.tail = prev;
  held.count += static_cast<std::uint32_t>(runs.total);
  free.top = index;
  free.count -= runs.total;
  last_serial = serial;
  count_fill(owner, runs.last_used, runs.copies);
  stats.n_reused += reused;
  stats.n_allocations += runs.total;
  use_reserved(owner, list, runs.total);
}

}  // namespace kvpool::core
