#include "kvpool/cache/stream_lease.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {

using core::BlockHandle;

StreamLease::StreamLease(std::shared_ptr<Pool> pool, OwnerId owner, core::FormatTag format)
    : pool_(std::move(pool)), owner_(owner), format_(format) {
  if (pool_ == nullptr) throw InvalidArgument("[StreamLease] pool must not be null");
}

StreamLease::~StreamLease() { release(); }

void StreamLease::lost() const {
  throw LeaseLost("[StreamLease] the blocks of owner " + std::to_string(owner_) +
                  " were freed behind the cache that holds them; release it to use it again");
}

void StreamLease::verify() const {
  for (const Side* side : {&keys_, &values_}) {
    if (!side->blocks.empty() && !pool_->info(side->blocks.back())) lost();
  }
}

void StreamLease::mark(const BlockHandle& block, std::int64_t n_used) const {
  try {
    pool_->mark_used(block, n_used);
  } catch (const InvalidArgument&) {
    lost();  // the value is in range and the handle ours
  }
}

StreamLease::Demand StreamLease::demand(Side& side, std::int64_t n_tokens) const {
  const auto held = static_cast<std::int64_t>(side.blocks.size());
  const std::int64_t missing = pool_->blocks_for_tokens(n_tokens) - held;
  if (missing <= 0) return {};
  side.blocks.reserve(static_cast<std::size_t>(held + missing));
  return {missing, n_tokens - held * pool_->config().block_size};
}

std::optional<core::Shortage> StreamLease::grow(Side& side, const Demand& demand) {
  if (demand.n_blocks == 0) return std::nullopt;
  std::vector<BlockHandle> fresh(static_cast<std::size_t>(demand.n_blocks));
  auto shortage = pool_->try_allocate(side.stream, demand.n_tokens, owner_, format_, fresh);
  if (!shortage) side.blocks.insert(side.blocks.end(), fresh.begin(), fresh.end());
  return shortage;
}

std::optional<core::Shortage> StreamLease::grow(const Demand& keys, const Demand& values) {
  if (keys.n_blocks == values.n_blocks && keys.n_blocks > 0) {
    // settle() writes the fill of the last blocks, so the longer run serves both.
    const std::int64_t n_tokens = std::max(keys.n_tokens, values.n_tokens);
    std::vector<BlockHandle> fresh(static_cast<std::size_t>(2 * keys.n_blocks));
    const auto key_blocks = std::span(fresh).first(static_cast<std::size_t>(keys.n_blocks));
    const auto value_blocks = std::span(fresh).last(key_blocks.size());
    if (auto shortage =
            pool_->try_allocate_kv(n_tokens, owner_, format_, format_, key_blocks, value_blocks)) {
      return shortage;
    }
    keys_.blocks.insert(keys_.blocks.end(), key_blocks.begin(), key_blocks.end());
    values_.blocks.insert(values_.blocks.end(), value_blocks.begin(), value_blocks.end());
    return std::nullopt;
  }
  if (auto shortage = grow(keys_, keys)) return shortage;
  auto shortage = grow(values_, values);
  if (shortage && keys.n_blocks > 0) {
    const auto first = keys_.blocks.size() - static_cast<std::size_t>(keys.n_blocks);
    pool_->free(std::span(keys_.blocks).subspan(first));
    keys_.blocks.resize(first);
  }
  return shortage;
}

// Brings fill and number of blocks from the side's present tokens to `n_tokens`; the blocks that it
// needs are there.
void StreamLease::settle(Side& side, std::int64_t n_tokens) {
  const std::int64_t block_size = pool_->config().block_size;
  const std::int64_t needed = pool_->blocks_for_tokens(n_tokens);
  const std::int64_t old_tail = pool_->blocks_for_tokens(side.n_tokens) - 1;
  if (old_tail >= 0 && old_tail < needed - 1 && side.n_tokens % block_size != 0) {
    mark(side.blocks[static_cast<std::size_t>(old_tail)], block_size);
  }
  if (const auto kept = static_cast<std::size_t>(needed); kept < side.blocks.size()) {
    // Own handles: those of earlier checkouts are skipped, none is foreign.
    pool_->free(std::span(side.blocks).subspan(kept));
    side.blocks.resize(kept);
  }
  if (needed > 0 && n_tokens != side.n_tokens) {
    mark(side.blocks.back(), n_tokens - (needed - 1) * block_size);
  }
  side.n_tokens = n_tokens;
}

std::optional<core::Shortage> StreamLease::try_resize(std::int64_t n_keys, std::int64_t n_values) {
  if (n_keys < 0 || n_values < 0) {
    throw InvalidArgument("[StreamLease::try_resize] n_keys and n_values must be >= 0, got " +
                          std::to_string(n_keys) + " and " + std::to_string(n_values));
  }
  verify();
  const Demand keys = demand(keys_, n_keys);
  const Demand values = demand(values_, n_values);
  if (auto shortage = grow(keys, values)) return shortage;
  settle(keys_, n_keys);
  settle(values_, n_values);
  return std::nullopt;
}

void StreamLease::release() noexcept {
  for (Side* side : {&keys_, &values_}) {
    try {
      if (!side->blocks.empty()) pool_->free(side->blocks);
    } catch (...) {  // NOLINT(bugprone-empty-catch)
      // Own handles are never refused; what else can fail must not leave a destructor.
    }
    side->blocks.clear();
    side->n_tokens = 0;
  }
}

void StreamLease::check_invariants() const {
  const auto require = [](bool holds, const char* book) {
    if (!holds) throw Error(std::string("[StreamLease::check_invariants] ") + book);
  };
  const std::int64_t block_size = pool_->config().block_size;
  for (const Side* side : {&keys_, &values_}) {
    const auto n = static_cast<std::int64_t>(side->blocks.size());
    require(n == pool_->blocks_for_tokens(side->n_tokens), "blocks do not match the tokens");
    for (std::int64_t i = 0; i < n; ++i) {
      const auto info = pool_->info(side->blocks[static_cast<std::size_t>(i)]);
      if (!info) continue;  // lost: the next use says so
      require(info->owner == owner_, "a block is another owner's");
      require(info->n_used == std::min(block_size, side->n_tokens - i * block_size),
              "n_used of a block does not follow the tokens");
    }
  }
}

}  // namespace kvpool::cache
