// The books read back from scratch and compared with the counters.
#include "pool_state.h"

namespace kvpool::core {

namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw Error("[BlockPoolAllocator::check_invariants] " + what);
}

void require_equal(std::int64_t counted, std::int64_t recorded, const std::string& what) {
  require(counted == recorded,
          what + ": counted " + std::to_string(counted) + ", recorded " + std::to_string(recorded));
}

}  // namespace

/// One walk over everything, counting as it goes.
class BlockPoolAllocator::State::Audit {
 public:
  explicit Audit(const State& state) : state_(state), seen_(state.blocks.size()) {}

  void run() {
    walk_owners();
    walk_blocks();
    walk_free_lists();
    walk_retired();
    compare_stats();
  }

 private:
  struct Seen {
    std::uint32_t references = 0;
    bool free = false;
  };

  void walk_owners() {
    std::size_t active = 0;
    std::int64_t n_extras = 0;
    for (std::uint32_t slot = 1; slot < state_.owners.size(); ++slot) {
      if (!state_.owners.is_active(slot)) continue;
      ++active;
      const OwnerRecord& owner = state_.owners[slot];
      const std::string who = "owner " + std::to_string(owner.id);
      require(owner.needed(), who + " is active without blocks, registration or reservation");
      require_equal(state_.owners.find(owner.id), slot, who + " slot");
      std::int64_t fragmented = 0;
      std::int64_t unused = 0;
      for (int list = 0; list < BlockTable::kListCount; ++list) {
        const OwnerList& held = owner.lists[list];
        reserved_[list] += held.reserved;
        std::int64_t count = 0;
        std::uint64_t order = 0;
        Reference prev = kNoReference;
        for (Reference i = held.head; i != kNoReference; i = state_.links(i).next) {
          const std::uint32_t index = state_.record_of(i);
          require(index < state_.blocks.size(), who + " refers to a record that does not exist");
          const BlockRecord& record = state_.blocks[index];
          const std::string what = who + " block " + std::to_string(record.id);
          require(state_.links(i).owner == slot, what + " belongs to another owner");
          require(state_.links(i).prev == prev, what + " is linked one way only");
          require(is_extra(i) || state_.is_live(record), what + " is held by a dead reference");
          require(state_.order_of(i) > order, what + " is out of order");
          require(record.stream == state_.stream_of(list), what + " is in a list of its own");
          require(!is_extra(i) || owner.shares, what + " is shared by an owner that shares none");
          order = state_.order_of(i);
          prev = i;
          n_extras += is_extra(i);
          ++seen_[index].references;
          fragmented += state_.is_fragmented(record.n_used);
          unused += state_.block_size - record.n_used;
          require(++count <= held.count, who + " has more blocks than it counts");
        }
        require_equal(count, held.count, who + " blocks");
        require(prev == held.tail, who + " does not end where it says");
      }
      if (!owner.shares) {
        require_equal(fragmented, owner.fragmented, who + " fragmented");
        require_equal(unused, owner.unused_slots, who + " unused slots");
      }
    }
    require_equal(static_cast<std::int64_t>(active),
                  static_cast<std::int64_t>(state_.owners.active()), "active owners");
    require_equal(n_extras, state_.extras.live(), "extra references");
  }

  void walk_blocks() {
    for (std::uint32_t index = 0; index < state_.blocks.size(); ++index) {
      const std::uint32_t references = seen_[index].references;
      if (references == 0) continue;
      const BlockRecord& record = state_.blocks[index];
      const std::string what = "block " + std::to_string(record.id);
      require(!record.retired && record.ever_allocated, what + " is in use but was never taken");
      require_equal(references, record.references, what + " references");
      require(record.n_used <= state_.block_size, what + " is over-full");
      require(record.serial <= state_.last_serial, what + " has a serial of the future");
      require(state_.formats.contains(FormatTag{record.format}), what + " has no format");
      ++in_use_;
      fragmented_ += state_.is_fragmented(record.n_used);
      unused_ += state_.block_size - record.n_used;
    }
  }

  void walk_free_lists() {
    for (int list = 0; list < BlockTable::kListCount; ++list) {
      const FreeList& free = state_.blocks.list(list);
      const std::string which = "free list " + std::string(name(state_.stream_of(list)));
      std::int64_t count = 0;
      for (std::uint32_t i = free.top; i != kNoReference; i = state_.blocks[i].links.prev) {
        require(i < state_.blocks.size(), which + " leads nowhere");
        const BlockRecord& record = state_.blocks[i];
        const std::string what = which + " block " + std::to_string(record.id);
        require(!seen_[i].free, what + " is listed twice");
        require(seen_[i].references == 0 && !state_.is_live(record), what + " is in use");
        require(!record.retired, what + " is retired");
        require(record.stream == state_.stream_of(list), what + " is of another stream");
        seen_[i].free = true;
        ++count;
      }
      require_equal(count, free.count, which);
      require_equal(reserved_[list], free.reserved, which + " reserved");
      require(free.reserved <= free.count, which + " has fewer blocks than are reserved");
      free_ += count;
    }
  }

  void walk_retired() {
    std::int64_t retired = 0;
    for (std::uint32_t i = state_.blocks.retired_top(); i != kNoReference;
         i = state_.blocks[i].links.prev) {
      require(state_.blocks[i].retired && !seen_[i].free && seen_[i].references == 0,
              "a retired record is in use");
      ++retired;
    }
    require_equal(in_use_ + free_ + retired, static_cast<std::int64_t>(state_.blocks.size()),
                  "blocks in use, free and retired");
  }

  void compare_stats() {
    const AllocationStats& recorded = state_.stats;
    require_equal(in_use_ + free_, recorded.n_blocks, "n_blocks");
    require_equal(state_.blocks.managed(), recorded.n_blocks, "managed blocks");
    require_equal(in_use_, recorded.blocks_in_use(), "blocks_in_use");
    require_equal(fragmented_, recorded.fragmented_count, "fragmented blocks");
    require_equal(unused_, recorded.unused_slot_count, "unused slots");
    require_equal(state_.config.n_blocks + recorded.n_grown - recorded.n_retired, recorded.n_blocks,
                  "blocks grown and retired");
    require_equal(state_.config.n_blocks + recorded.n_grown, state_.blocks.next_id(), "ids minted");
    require(recorded.peak_blocks_in_use >= in_use_, "peak_blocks_in_use is below blocks_in_use");
    require(recorded.n_reused <= recorded.n_allocations, "n_reused is above n_allocations");
    require(!state_.config.max_blocks || recorded.n_blocks <= *state_.config.max_blocks,
            "n_blocks is above max_blocks");
  }

  const State& state_;
  std::vector<Seen> seen_;  // by record
  std::int64_t reserved_[BlockTable::kListCount] = {};
  std::int64_t in_use_ = 0;
  std::int64_t free_ = 0;
  std::int64_t fragmented_ = 0;
  std::int64_t unused_ = 0;
};

void BlockPoolAllocator::State::check_invariants() const { Audit(*this).run(); }

}  // namespace kvpool::core
