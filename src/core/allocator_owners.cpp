// Who is active, and what is kept for whom.
#include "pool_state.h"

namespace kvpool::core {

void BlockPoolAllocator::register_owner(OwnerId owner) {
  constexpr const char* kCall = "BlockPoolAllocator::register_owner";
  State& state = *state_;
  std::lock_guard guard(state.lock);
  state.check_owner(kCall, "owner", owner);
  const std::uint32_t known = state.owners.find(owner);
  if (known != kNoOwner) {
    const OwnerRecord& record = state.owners[known];
    if (record.registered || record.count() != 0) {
      throw OwnerAlreadyActive(in_call(kCall) + "owner " + std::to_string(owner) +
                               " is still active with " + std::to_string(record.count()) +
                               " blocks");
    }
  } else {
    state.owners.make_room();
  }
  state.owners[state.activate(owner)].registered = true;
}

void BlockPoolAllocator::release_owner(OwnerId owner) {
  State& state = *state_;
  std::lock_guard guard(state.lock);
  const std::uint32_t slot = state.owners.find(owner);
  if (slot == kNoOwner) return;
  OwnerRecord& record = state.owners[slot];
  if (const std::int64_t held = record.count()) {
    throw InvalidArgument("[BlockPoolAllocator::release_owner] owner " + std::to_string(owner) +
                          " still has " + std::to_string(held) + " blocks");
  }
  state.cancel_reservations(record);
  state.owners.remove(slot);
}

bool BlockPoolAllocator::is_active(OwnerId owner) const {
  std::lock_guard guard(state_->lock);
  return state_->owners.find(owner) != kNoOwner;
}

OwnerId BlockPoolAllocator::new_owner() {
  std::lock_guard guard(state_->lock);
  if (state_->next_minted_owner == State::kEndOfMintedOwners) {
    throw Error("[BlockPoolAllocator::new_owner] no id is left");
  }
  return state_->next_minted_owner++;
}

std::optional<Shortage> BlockPoolAllocator::try_reserve(OwnerId owner, std::int64_t n_key_blocks,
                                                        std::int64_t n_value_blocks) {
  constexpr const char* kCall = "BlockPoolAllocator::reserve";
  const auto check = [&](const char* argument, std::int64_t n) {
    if (n < 0) {
      throw InvalidArgument(in_call(kCall) + argument + " must be >= 0, got " + std::to_string(n));
    }
  };
  check("n_key_blocks", n_key_blocks);
  check("n_value_blocks", n_value_blocks);
  State& state = *state_;
  std::lock_guard guard(state.lock);
  state.check_owner(kCall, "owner", owner);
  State::Demand wanted;
  if (state.config.separate_kv) {
    wanted = {{n_key_blocks, n_value_blocks}};
  } else if (__builtin_add_overflow(n_key_blocks, n_value_blocks, &wanted.blocks[0])) {
    wanted.blocks[0] = std::numeric_limits<std::int64_t>::max();  // more than any pool has
  }
  std::uint32_t slot = kNoOwner;
  if (auto shortage = state.obtain(owner, wanted, slot)) return shortage;
  for (int list = 0; list < BlockTable::kListCount; ++list) {
    state.set_reserved(state.owners[slot], list, wanted.blocks[list]);
  }
  state.retire_owner(slot);
  state.history.add(state.stats);
  return std::nullopt;
}

std::int64_t BlockPoolAllocator::n_reserved(Stream stream, OwnerId owner) const {
  const int list = state_->list_of("BlockPoolAllocator::n_reserved", stream);
  std::lock_guard guard(state_->lock);
  return state_->owners[state_->owners.find(owner)].lists[list].reserved;
}

}  // namespace kvpool::core
