#include "kvpool/core/block_pool_allocator.h"

#include <utility>

#include "pool_state.h"

namespace kvpool::core {

BlockPoolAllocator::BlockPoolAllocator(PoolConfig config) {
  config.validate();
  state_ = std::make_unique<State>(config);
}

BlockPoolAllocator::~BlockPoolAllocator() = default;

const PoolConfig& BlockPoolAllocator::config() const noexcept { return state_->config; }

std::uint64_t BlockPoolAllocator::pool_id() const noexcept { return state_->pool_id; }

std::int64_t BlockPoolAllocator::blocks_for_tokens(std::int64_t n_tokens) const noexcept {
  return n_tokens <= 0 ? 0 : (n_tokens - 1) / state_->config.block_size + 1;
}

FormatTag BlockPoolAllocator::intern_format(std::string_view format) {
  std::lock_guard guard(state_->lock);
  return state_->formats.intern(format);
}

std::string BlockPoolAllocator::format_name(FormatTag tag) const {
  std::lock_guard guard(state_->lock);
  state_->check_format("BlockPoolAllocator::format_name", tag);
  return state_->formats.name(tag);
}

namespace {

/// `list` with one more entry, without those that are gone.
template <typename List>
std::shared_ptr<const List> extended(const std::shared_ptr<const List>& list,
                                     typename List::value_type observer) {
  auto longer = std::make_shared<List>();
  if (list) *longer = *list;
  std::erase_if(*longer, [](const auto& known) { return known.expired(); });
  longer->push_back(std::move(observer));
  return longer;
}

}  // namespace

void BlockPoolAllocator::add_observer(std::weak_ptr<PoolObserver> observer) {
  std::shared_ptr<const ObserverList> replaced;  // destroyed after the lock is released
  std::lock_guard guard(state_->lock);
  replaced = std::exchange(state_->observers, extended(state_->observers, std::move(observer)));
}

void BlockPoolAllocator::add_pin_observer(std::weak_ptr<PinObserver> observer) {
  std::shared_ptr<const PinObserverList> replaced;
  std::lock_guard guard(state_->lock);
  replaced =
      std::exchange(state_->pin_observers, extended(state_->pin_observers, std::move(observer)));
}

std::int64_t BlockPoolAllocator::n_free(Stream stream) const {
  const int list = state_->list_of("BlockPoolAllocator::n_free", stream);
  std::lock_guard guard(state_->lock);
  return state_->blocks.list(list).count;
}

std::int64_t BlockPoolAllocator::n_available(Stream stream) const {
  const int list = state_->list_of("BlockPoolAllocator::n_available", stream);
  std::lock_guard guard(state_->lock);
  return state_->blocks.list(list).count - state_->blocks.list(list).reserved;
}

std::int64_t BlockPoolAllocator::n_allocatable(Stream stream, OwnerId owner) const {
  const int list = state_->list_of("BlockPoolAllocator::n_allocatable", stream);
  std::lock_guard guard(state_->lock);
  return state_->free_for(list, state_->owners.find(owner)) + state_->headroom();
}

std::vector<BlockHandle> BlockPoolAllocator::blocks_for(OwnerId owner) const {
  const State& state = *state_;
  std::vector<BlockHandle> handles;
  std::int64_t count = 0;
  for (;;) {  // memory is asked for outside the lock
    handles.reserve(static_cast<std::size_t>(count));
    std::lock_guard guard(state.lock);
    const OwnerRecord& held = state.owners[state.owners.find(owner)];
    count = held.count();
    if (handles.capacity() < static_cast<std::size_t>(count)) continue;
    // Both lists are sorted by order: merge them.
    Reference a = held.lists[0].head;
    Reference b = held.lists[1].head;
    while (a != kNoReference || b != kNoReference) {
      Reference& next = state.earlier(a, b) ? a : b;
      handles.push_back(state.handle_of(next));
      next = state.links(next).next;
    }
    return handles;
  }
}

std::optional<BlockInfo> BlockPoolAllocator::info(const BlockHandle& block) const {
  const State& state = *state_;
  std::lock_guard guard(state.lock);
  const Reference reference = state.resolve("BlockPoolAllocator::info", block);
  if (reference == kNoReference) return std::nullopt;
  const BlockRecord& record = state.blocks[block.record];
  return BlockInfo{block.id,
                   record.stream,
                   FormatTag{record.format},
                   record.n_used,
                   state.owners[state.links(reference).owner].id,
                   record.references,
                   record.serial};
}

AllocationStats BlockPoolAllocator::stats() const {
  std::lock_guard guard(state_->lock);
  return state_->stats;
}

std::vector<AllocationStats> BlockPoolAllocator::history() const {
  std::vector<AllocationStats> snapshots;
  snapshots.reserve(kHistorySize);
  std::lock_guard guard(state_->lock);
  state_->history.copy_to(snapshots);
  return snapshots;
}

std::int64_t BlockPoolAllocator::shrink(Stream stream, std::int64_t target_free) {
  constexpr const char* kCall = "BlockPoolAllocator::shrink";
  if (target_free < 0) {
    throw InvalidArgument(in_call(kCall) + "target_free must be >= 0, got " +
                          std::to_string(target_free));
  }
  State& state = *state_;
  const int list = state.list_of(kCall, stream);
  Notice notice;
  std::int64_t n = 0;
  {
    std::lock_guard guard(state.lock);
    const FreeList& free = state.blocks.list(list);
    n = free.count - std::max(target_free, free.reserved);
    if (n <= 0) return 0;
    notice.prepare(state.observers, n);
    state.blocks.retire(list, n, [&](std::uint32_t index) {
      const BlockRecord& record = state.blocks[index];
      notice.add({BlockId{record.id}, index, record.ever_allocated ? record.serial : 0});
    });
    state.stats.n_blocks -= n;
    state.stats.n_retired += n;
    state.history.add(state.stats);
  }
  notice.deliver(&PoolObserver::blocks_retired);
  return n;
}

void BlockPoolAllocator::check_invariants() const {
  std::lock_guard guard(state_->lock);
  state_->check_invariants();
}

}  // namespace kvpool::core
