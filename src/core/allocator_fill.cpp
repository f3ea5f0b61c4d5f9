// How full blocks are, and in which format.
#include "pool_state.h"

namespace kvpool::core {

namespace {
constexpr const char* kMarkUsed = "BlockPoolAllocator::mark_used";
}

void BlockPoolAllocator::mark_used(const BlockHandle& block, std::int64_t n_used) {
  mark_used(std::span(&block, 1), n_used);
}

void BlockPoolAllocator::mark_used(std::span<const BlockHandle> blocks, std::int64_t n_used) {
  State& state = *state_;
  if (n_used < 0 || n_used > state.block_size) {
    throw InvalidArgument(in_call(kMarkUsed) + "n_used must be between 0 and " +
                          std::to_string(state.block_size) + ", got " + std::to_string(n_used));
  }
  const auto fill = static_cast<std::uint32_t>(n_used);
  const auto n = static_cast<std::int64_t>(blocks.size());
  std::lock_guard guard(state.lock);
  const std::uint32_t slot = n == 0 ? kNoOwner : state.owner_of(blocks[0]);
  if (state.are_alone(blocks, slot)) {
    state.fill_each(state.owners[slot], blocks, fill);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t index = n == 1 ? -1 : i;
    const Reference reference = state.resolve_live(kMarkUsed, blocks[i], index);
    const BlockRecord& record = state.blocks[state.record_of(reference)];
    if (record.references != 1 && record.n_used != fill) {
      state.refuse_shared(kMarkUsed, blocks[i], index);
    }
  }
  for (const BlockHandle& block : blocks) {
    state.fill_each(state.owners[state.owner_of(block)], {&block, 1}, fill);
  }
}

void BlockPoolAllocator::State::fill_each(OwnerRecord& owner, std::span<const BlockHandle> handles,
                                          std::uint32_t n_used) noexcept {
  const auto n = static_cast<std::int64_t>(handles.size());
  std::int64_t were_fragmented = 0;
  std::int64_t were_used = 0;
  for (const BlockHandle& handle : handles) {
    BlockRecord& record = blocks[handle.record];
    were_fragmented += is_fragmented(record.n_used);
    were_used += record.n_used;
    record.n_used = n_used;
  }
  move_gauges(owner, n * is_fragmented(n_used) - were_fragmented, were_used - n * n_used);
}

void BlockPoolAllocator::set_format(const BlockHandle& block, FormatTag format) {
  constexpr const char* kCall = "BlockPoolAllocator::set_format";
  State& state = *state_;
  std::lock_guard guard(state.lock);
  state.check_format(kCall, format);
  const Reference reference = state.resolve_live(kCall, block);
  BlockRecord& record = state.blocks[state.record_of(reference)];
  const auto tag = static_cast<std::uint16_t>(format);
  if (record.references != 1 && record.format != tag) state.refuse_shared(kCall, block, -1);
  record.format = tag;
}

}  // namespace kvpool::core
