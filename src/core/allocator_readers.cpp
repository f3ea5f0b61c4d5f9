// Pins: what keeps a block in use without owning it.
#include "pool_state.h"

namespace kvpool::core {

void BlockPoolAllocator::pin(std::span<const BlockHandle> blocks) {
  constexpr const char* kCall = "BlockPoolAllocator::pin";
  State& state = *state_;
  const auto n = static_cast<std::int64_t>(blocks.size());
  std::lock_guard guard(state.lock);
  for (std::int64_t i = 0; i < n; ++i) state.resolve_live(kCall, blocks[i], n == 1 ? -1 : i);
  if (state.pins.size() < state.blocks.size()) state.pins.resize(state.blocks.size());
  for (const BlockHandle& block : blocks) {
    ++state.pins[block.record];
    state.owners[state.owner_of(block)].pinned = true;
  }
}

void BlockPoolAllocator::unpin(std::span<const BlockHandle> blocks) {
  constexpr const char* kCall = "BlockPoolAllocator::unpin";
  State& state = *state_;
  Notice notice;
  {
    std::lock_guard guard(state.lock);
    // A pinned block's record is not used again, so it says whom the handle means.
    for (const BlockHandle& block : blocks) {
      if (block.pool != state.pool_id || !state.is_pinned(block.record) ||
          state.blocks[block.record].id != value(block.id)) {
        throw InvalidArgument(in_call(kCall) + "block " + std::to_string(value(block.id)) +
                              " is not pinned");
      }
    }
    const std::int64_t freed_before = state.stats.n_frees;
    notice.prepare(state.observers, static_cast<std::int64_t>(blocks.size()));
    for (const BlockHandle& block : blocks) {
      std::uint32_t& pins = state.pins[block.record];
      if (pins == 0) continue;  // named more often than it was pinned
      --pins;
      if (pins != 0) continue;
      const BlockRecord& record = state.blocks[block.record];
      if (record.references != 0) continue;
      state.stats.fragmented_count -= state.is_fragmented(record.n_used);
      state.stats.unused_slot_count -= state.block_size - record.n_used;
      state.give_back(block.record, notice);
    }
    if (state.stats.n_frees != freed_before) state.history.add(state.stats);
  }
  notice.deliver(&PoolObserver::blocks_freed);
}

}  // namespace kvpool::core
