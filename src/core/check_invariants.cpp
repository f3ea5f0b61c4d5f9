// The books read back from scratch and compared with the counters.
#include <sstream>

#include "pool_state.h"

namespace kvpool::core {

namespace {

/// The message is put together only when it is needed.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  message << "[BlockPoolAllocator::check_invariants] ";
  (message << ... << parts);
  throw Error(message.str());
}

template <typename... Parts>
void require_equal(std::int64_t counted, std::int64_t recorded, const Parts&... what) {
  require(counted == recorded, what..., ": counted ", counted, ", recorded ", recorded);
}

}  // namespace

/// One walk over everything, counting as it goes.
class BlockPoolAllocator::State::Audit {
 public:
  explicit Audit(const State& state) : state_(state), seen_(state.blocks.size()) {}

  void run() {
    walk_owners();
    walk_blocks();
    for (int list = 0; list < BlockTable::kListCount; ++list) walk_free_list(list);
    walk_retired();
    compare_stats();
  }

 private:
  struct Seen {
    std::uint32_t references = 0;
    bool free = false;
  };
  struct Fill {
    std::int64_t fragmented = 0;
    std::int64_t unused = 0;
  };

  void add_fill(Fill& fill, const BlockRecord& record) const {
    fill.fragmented += state_.is_fragmented(record.n_used);
    fill.unused += state_.block_size - record.n_used;
  }

  void walk_owners() {
    std::int64_t active = 0;
    for (std::uint32_t slot = 1; slot < state_.owners.size(); ++slot) {
      if (!state_.owners.is_active(slot)) continue;
      ++active;
      const OwnerRecord& owner = state_.owners[slot];
      require(owner.needed(), "owner ", owner.id, " is active though nothing keeps it");
      require_equal(state_.owners.find(owner.id), slot, "owner ", owner.id, " slot");
      Fill fill;
      for (int list = 0; list < BlockTable::kListCount; ++list) walk_owner_list(slot, list, fill);
      if (owner.shares) continue;
      require_equal(fill.fragmented, owner.fragmented, "owner ", owner.id, " fragmented");
      require_equal(fill.unused, owner.unused_slots, "owner ", owner.id, " unused slots");
    }
    require_equal(active, static_cast<std::int64_t>(state_.owners.active()), "active owners");
    require_equal(extra_, state_.extras.live(), "extra references");
  }

  void walk_owner_list(std::uint32_t slot, int list, Fill& fill) {
    const OwnerRecord& owner = state_.owners[slot];
    const OwnerList& held = owner.lists[list];
    reserved_[list] += held.reserved;
    std::int64_t count = 0;
    std::uint64_t order = 0;
    Reference prev = kNoReference;
    for (Reference i = held.head; i != kNoReference; i = state_.links(i).next) {
      const std::uint32_t index = state_.record_of(i);
      require(index < state_.blocks.size(), "owner ", owner.id, " refers to no record: ", index);
      const BlockRecord& record = state_.blocks[index];
      const auto check = [&](bool holds, const char* what) {
        require(holds, "owner ", owner.id, " block ", record.id, what);
      };
      check(state_.links(i).owner == slot, " belongs to another owner");
      check(state_.links(i).prev == prev, " is linked one way only");
      check(is_extra(i) || state_.is_live(record), " is held by a dead reference");
      check(state_.order_of(i) > order, " is out of order");
      check(record.stream == state_.stream_of(list), " is in another stream's list");
      check(!is_extra(i) || owner.shares, " is shared by an owner that shares none");
      check(++count <= held.count, " comes after the last one counted");
      order = state_.order_of(i);
      prev = i;
      extra_ += is_extra(i);
      ++seen_[index].references;
      add_fill(fill, record);
    }
    require_equal(count, held.count, "owner ", owner.id, " blocks");
    require(prev == held.tail, "owner ", owner.id, " does not end where it says");
  }

  void walk_blocks() {
    for (std::uint32_t index = 0; index < state_.blocks.size(); ++index) {
      const std::uint32_t references = seen_[index].references;
      if (references == 0 && !state_.is_pinned(index)) continue;
      const BlockRecord& record = state_.blocks[index];
      const auto check = [&](bool holds, const char* what) {
        require(holds, "block ", record.id, what);
      };
      require_equal(references, record.references, "block ", record.id, " references");
      check(!record.retired && record.ever_allocated, " is in use but was never taken");
      check(record.n_used <= state_.block_size, " is over-full");
      check(record.serial <= state_.last_serial, " has a serial of the future");
      check(state_.formats.contains(FormatTag{record.format}), " has no format");
      ++in_use_;
      add_fill(fill_, record);
    }
  }

  void walk_free_list(int list) {
    const FreeList& free = state_.blocks.list(list);
    const std::string_view stream = name(state_.stream_of(list));
    std::int64_t count = 0;
    for (std::uint32_t i = free.top; i != kNoReference; i = state_.blocks[i].links.prev) {
      require(i < state_.blocks.size(), "free list ", stream, " leads to no record: ", i);
      const BlockRecord& record = state_.blocks[i];
      const auto check = [&](bool holds, const char* what) {
        require(holds, "free list ", stream, " block ", record.id, what);
      };
      check(!seen_[i].free, " is listed twice");
      check(seen_[i].references == 0 && !state_.is_live(record), " is in use");
      check(!state_.is_pinned(i), " is pinned");
      check(!record.retired, " is retired");
      check(record.stream == state_.stream_of(list), " is of another stream");
      seen_[i].free = true;
      ++count;
    }
    require_equal(count, free.count, "free list ", stream);
    require_equal(reserved_[list], free.reserved, "free list ", stream, " reserved");
    require(free.reserved <= free.count, "stream ", stream, " has more reserved than free blocks");
    free_ += count;
  }

  void walk_retired() {
    std::int64_t retired = 0;
    for (std::uint32_t i = state_.blocks.retired_top(); i != kNoReference;
         i = state_.blocks[i].links.prev) {
      require(state_.blocks[i].retired && !seen_[i].free && seen_[i].references == 0,
              "retired record ", i, " is in use");
      ++retired;
    }
    require_equal(in_use_ + free_ + retired, state_.blocks.size(), "in use, free and retired");
  }

  void compare_stats() {
    const AllocationStats& recorded = state_.stats;
    const std::int64_t made = state_.config.n_blocks + recorded.n_grown;
    require_equal(in_use_ + free_, recorded.n_blocks, "n_blocks");
    require_equal(state_.blocks.managed(), recorded.n_blocks, "managed blocks");
    require_equal(in_use_, recorded.blocks_in_use(), "blocks_in_use");
    require_equal(fill_.fragmented, recorded.fragmented_count, "fragmented blocks");
    require_equal(fill_.unused, recorded.unused_slot_count, "unused slots");
    require_equal(made - recorded.n_retired, recorded.n_blocks, "blocks grown and retired");
    require_equal(made, state_.blocks.next_id(), "ids minted");
    require(recorded.peak_blocks_in_use >= in_use_, "peak_blocks_in_use is below blocks_in_use");
    require(recorded.n_reused <= recorded.n_allocations, "n_reused is above n_allocations");
    require(!state_.config.max_blocks || recorded.n_blocks <= *state_.config.max_blocks,
            "n_blocks is above max_blocks");
  }

  const State& state_;
  std::vector<Seen> seen_;  // by record
  std::int64_t reserved_[BlockTable::kListCount] = {};
  std::int64_t extra_ = 0;
  std::int64_t in_use_ = 0;
  std::int64_t free_ = 0;
  Fill fill_;
};

void BlockPoolAllocator::State::check_invariants() const { Audit(*this).run(); }

}  // namespace kvpool::core
