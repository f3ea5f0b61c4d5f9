#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "kvpool/core/allocation_stats.h"
#include "kvpool/core/pool_config.h"
#include "kvpool/core/stream.h"

namespace kvpool::core::testing {

/// The allocator's contract once more, in standard containers and with no eye to speed: what the
/// property tests and the fuzzer compare BlockPoolAllocator with. References are numbered in the
/// order in which they are made. Arguments are expected to be in range; calls that the contract
/// refuses because of the pool's state return kRefused and change nothing.
class NaivePool {
 public:
  enum class Outcome { kDone, kShort, kRefused };
  using Ref = std::size_t;
  using Id = std::uint32_t;

  struct Block {
    int list = 0;
    int format = 0;
    std::int64_t n_used = 0;
    std::int64_t references = 0;
    bool ever_allocated = false;
  };
  struct Reference {
    Id id = 0;
    OwnerId owner = 0;
    bool live = false;
  };
  struct Owner {
    std::vector<Ref> refs;
    bool registered = false;
    std::int64_t reserved[2] = {};

    bool needed() const { return registered || !refs.empty() || reserved[0] || reserved[1]; }
  };

  explicit NaivePool(PoolConfig config) : config_(config) {
    const std::int64_t n_keys = config.separate_kv ? (config.n_blocks + 1) / 2 : config.n_blocks;
    mint(0, n_keys);
    mint(1, config.n_blocks - n_keys);
  }

  int list_of(Stream stream) const {
    return config_.separate_kv && stream == Stream::kValue ? 1 : 0;
  }

  /// Runs of ceil(n_tokens / block_size) blocks for each stream in `streams`, in their order.
  Outcome allocate(const std::vector<Stream>& streams, std::int64_t n_tokens, OwnerId owner,
                   const std::vector<int>& formats, std::int64_t copies, std::vector<Ref>& made) {
    const std::int64_t run = (n_tokens + config_.block_size - 1) / config_.block_size;
    std::int64_t wanted[2] = {};
    for (Stream stream : streams) wanted[list_of(stream)] += run * copies;
    if (!grow_for(owner, wanted)) return exhausted();
    for (std::size_t i = 0; i < streams.size(); ++i) {
      for (std::int64_t copy = 0; copy < copies; ++copy) {
        for (std::int64_t left = n_tokens; left > 0; left -= config_.block_size) {
          const Id id = take(list_of(streams[i]), owner);
          blocks_[id].format = formats[i];
          blocks_[id].n_used = std::min(left, config_.block_size);
          made.push_back(add_reference(id, owner));
          owners_[owner].refs.push_back(made.back());
        }
      }
    }
    return allocated();
  }

  Outcome free(const std::vector<Ref>& list) {
    for (Ref ref : list) drop(ref);
    snapshot();
    return Outcome::kDone;
  }

  std::int64_t free_all(OwnerId owner) {
    const std::vector<Ref> held = refs_of(owner);
    owners_.erase(owner);
    for (Ref ref : held) drop(ref);
    owners_.erase(owner);
    snapshot();
    return static_cast<std::int64_t>(held.size());
  }

  Outcome register_owner(OwnerId owner) {
    const auto found = owners_.find(owner);
    if (found != owners_.end() && (found->second.registered || !found->second.refs.empty())) {
      return Outcome::kRefused;
    }
    owners_[owner].registered = true;
    return Outcome::kDone;
  }

  Outcome release_owner(OwnerId owner) {
    if (!refs_of(owner).empty()) return Outcome::kRefused;
    owners_.erase(owner);
    return Outcome::kDone;
  }

  Outcome fork(OwnerId owner, OwnerId new_owner, std::vector<Ref>& made) {
    if (!refs_of(new_owner).empty()) return Outcome::kRefused;
    for (Ref ref : refs_of(owner)) {
      made.push_back(add_reference(references_[ref].id, new_owner));
      owners_[new_owner].refs.push_back(made.back());
    }
    return Outcome::kDone;
  }

  /// `out` is the reference itself where the block is the owner's alone.
  Outcome writable(Ref ref, Ref& out) {
    if (!references_[ref].live) return Outcome::kRefused;
    const Id shared = references_[ref].id;
    const OwnerId owner = references_[ref].owner;
    out = ref;
    if (blocks_[shared].references == 1) return Outcome::kDone;
    std::int64_t wanted[2] = {};
    wanted[blocks_[shared].list] = 1;
    if (!grow_for(owner, wanted)) return exhausted();
    const Id id = take(blocks_[shared].list, owner);
    blocks_[id].format = blocks_[shared].format;
    blocks_[id].n_used = blocks_[shared].n_used;
    out = add_reference(id, owner);
    std::replace(owners_[owner].refs.begin(), owners_[owner].refs.end(), ref, out);
    references_[ref].live = false;
    --blocks_[shared].references;
    return allocated();
  }

  Outcome mark_used(const std::vector<Ref>& list, std::int64_t n_used) {
    for (Ref ref : list) {
      if (!references_[ref].live) return Outcome::kRefused;
      const Block& block = blocks_.at(references_[ref].id);
      if (block.references > 1 && block.n_used != n_used) return Outcome::kRefused;
    }
    for (Ref ref : list) blocks_.at(references_[ref].id).n_used = n_used;
    return Outcome::kDone;
  }

  Outcome set_format(Ref ref, int format) {
    if (!references_[ref].live) return Outcome::kRefused;
    Block& block = blocks_.at(references_[ref].id);
    if (block.references > 1 && block.format != format) return Outcome::kRefused;
    block.format = format;
    return Outcome::kDone;
  }

  Outcome reserve(OwnerId owner, std::int64_t n_keys, std::int64_t n_values) {
    std::int64_t wanted[2] = {n_keys, n_values};
    if (!config_.separate_kv) {
      wanted[0] += wanted[1];
      wanted[1] = 0;
    }
    if (!grow_for(owner, wanted)) return exhausted();
    std::copy(wanted, wanted + 2, owners_[owner].reserved);
    forget_if_idle(owner);
    snapshot();
    return Outcome::kDone;
  }

  std::int64_t shrink(Stream stream, std::int64_t target_free) {
    const int list = list_of(stream);
    const std::int64_t n = n_free(list) - std::max(target_free, n_reserved(list));
    if (n <= 0) return 0;
    for (bool fresh : {true, false}) {
      auto& stack = free_[list];
      for (auto id = stack.begin(); id != stack.end();) {
        if (std::ssize(retired) == n || blocks_[*id].ever_allocated == fresh) {
          ++id;
        } else {
          retired.insert(*id);
          id = stack.erase(id);
        }
      }
    }
    for (Id id : retired) blocks_.erase(id);
    stats_.n_retired += n;
    snapshot();
    return n;
  }

  // --- what it says ------------------------------------------------------------------------------

  AllocationStats stats() const {
    AllocationStats stats = stats_;
    stats.n_blocks = std::ssize(blocks_);
    for (const auto& [id, block] : blocks_) {
      if (block.references == 0) continue;
      stats.fragmented_count += block.n_used > 0 && block.n_used < config_.block_size;
      stats.unused_slot_count += config_.block_size - block.n_used;
    }
    return stats;
  }
  const std::deque<AllocationStats>& history() const { return history_; }
  const Reference& reference(Ref ref) const { return references_[ref]; }
  const Block& block(Id id) const { return blocks_.at(id); }
  std::vector<Ref> refs_of(OwnerId owner) const {
    const auto found = owners_.find(owner);
    return found == owners_.end() ? std::vector<Ref>{} : found->second.refs;
  }
  bool is_active(OwnerId owner) const { return owners_.contains(owner); }
  std::int64_t n_free(int list) const { return std::ssize(free_[list]); }
  std::int64_t n_reserved(int list) const {
    std::int64_t sum = 0;
    for (const auto& [id, owner] : owners_) sum += owner.reserved[list];
    return sum;
  }
  std::int64_t n_reserved(int list, OwnerId owner) const {
    const auto found = owners_.find(owner);
    return found == owners_.end() ? 0 : found->second.reserved[list];
  }
  std::int64_t n_allocatable(int list, OwnerId owner) const {
    return n_free(list) - n_reserved(list) + n_reserved(list, owner) + headroom();
  }

  /// Blocks that went back or were retired since these were last cleared.
  std::multiset<Id> freed;
  std::set<Id> retired;

 private:
  void mint(int list, std::int64_t n) {
    for (; n > 0; --n) {
      blocks_[next_id_] = Block{.list = list};
      free_[list].push_back(next_id_++);
    }
  }

  std::int64_t headroom() const {
    if (!config_.grow_on_exhaustion) return 0;
    const std::int64_t most = config_.max_blocks.value_or(1'000'000);
    return std::max<std::int64_t>(most - std::ssize(blocks_), 0);
  }

  bool grow_for(OwnerId owner, const std::int64_t (&wanted)[2]) {
    std::int64_t missing[2];
    for (int list : {0, 1}) {
      const std::int64_t others = n_reserved(list) - n_reserved(list, owner);
      missing[list] = std::max<std::int64_t>(wanted[list] - (n_free(list) - others), 0);
    }
    if (missing[0] + missing[1] > headroom()) return false;
    for (int list : {0, 1}) {
      mint(list, missing[list]);
      stats_.n_grown += missing[list];
    }
    return true;
  }

  Id take(int list, OwnerId owner) {
    const Id id = free_[list].back();
    free_[list].pop_back();
    ++stats_.n_allocations;
    stats_.n_reused += blocks_[id].ever_allocated;
    blocks_[id].ever_allocated = true;
    if (auto& reserved = owners_[owner].reserved[list]) --reserved;
    return id;
  }

  Ref add_reference(Id id, OwnerId owner) {
    ++blocks_[id].references;
    references_.push_back({id, owner, true});
    return references_.size() - 1;
  }

  void drop(Ref ref) {
    Reference& reference = references_[ref];
    if (!reference.live) return;
    reference.live = false;
    std::erase(owners_[reference.owner].refs, ref);
    forget_if_idle(reference.owner);
    Block& block = blocks_[reference.id];
    if (--block.references == 0) {
      ++stats_.n_frees;
      freed.insert(reference.id);
      free_[block.list].push_back(reference.id);
    }
  }

  void forget_if_idle(OwnerId owner) {
    if (!owners_[owner].needed()) owners_.erase(owner);
  }

  Outcome allocated() {
    stats_.peak_blocks_in_use = std::max(stats_.peak_blocks_in_use, stats_.blocks_in_use());
    snapshot();
    return Outcome::kDone;
  }

  Outcome exhausted() {
    ++stats_.n_exhausted;
    snapshot();
    return Outcome::kShort;
  }

  void snapshot() {
    history_.push_back(stats());
    if (history_.size() > 256) history_.pop_front();
  }

  PoolConfig config_;
  AllocationStats stats_;  // the counters; gauges are worked out when asked for
  std::map<Id, Block> blocks_;
  std::vector<Id> free_[2];  // top at the back
  std::vector<Reference> references_;
  std::map<OwnerId, Owner> owners_;
  std::deque<AllocationStats> history_;
  Id next_id_ = 0;
};

}  // namespace kvpool::core::testing
