#include "kvpool/cache/lease_group.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {

using core::Stream;

LeaseGroup::LeaseGroup(std::shared_ptr<Pool> pool, OwnerId owner)
    : pool_(std::move(pool)), owner_(owner) {}

LeaseGroup::~LeaseGroup() { close_step(); }

std::int64_t LeaseGroup::n_layers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(layers_.size());
}

std::int64_t LeaseGroup::n_blocks() const {
  const std::lock_guard lock(mutex_);
  std::int64_t n = 0;
  for (const auto& layer : layers_) n += layer->lease.n_blocks();
  return n;
}

bool LeaseGroup::torn() const noexcept {
  if (!in_step_) return false;
  if (writing_ != nullptr) return true;
  return stopped_half_way(layers_, [](const auto& layer) { return layer->moved; });
}

// Whether the step is seen to be torn when `layer` starts to move.
bool LeaseGroup::torn_before(const Layer& layer) const noexcept {
  return layer.moved ? torn() : in_step_ && writing_ != nullptr;
}

std::int64_t LeaseGroup::pairs_needed(std::int64_t batch, std::int64_t n_tokens,
                                      int halvings) const {
  std::int64_t pairs = 0;
  for (const auto& layer : layers_) {
    const BufferShape after = layer->growth.after(layer->now, n_tokens, halvings);
    const std::int64_t more = layer->lease.pairs_for(batch, after.rows) - layer->lease.n_pairs();
    pairs += std::max<std::int64_t>(more, 0);
  }
  return pairs;
}

// What it takes to bring every layer to the rows of the longest: a layer that grows early must not
// take the room that the others will need.
std::int64_t LeaseGroup::pairs_to_follow(std::int64_t batch, std::int64_t n_tokens) const {
  std::int64_t rows = 0;
  for (const auto& layer : layers_) {
    if (!layer->growth.has_spare()) continue;
    rows = std::max(rows, layer->growth.after(layer->now, n_tokens, 0).rows);
  }
  std::int64_t pairs = 0;
  for (const auto& layer : layers_) {
    const BufferShape after = layer->growth.after(layer->now, n_tokens, 0);
    const std::int64_t own = layer->growth.has_spare() ? rows : after.rows;
    const std::int64_t more = layer->lease.pairs_for(batch, own) - layer->lease.n_pairs();
    pairs += std::max<std::int64_t>(more, 0);
  }
  return pairs;
}

// The same where every layer gives its spare rows back first; below 0 where that frees more.
std::int64_t LeaseGroup::pairs_needed_tightened(std::int64_t batch, std::int64_t n_tokens) const {
  std::int64_t pairs = 0;
  for (const auto& layer : layers_) {
    const BufferGrowth& growth = layer->growth;
    const BufferShape after =
        growth.after(growth.tightened(layer->now), n_tokens, BufferGrowth::kNoSpare);
    pairs += layer->lease.pairs_for(batch, after.rows) - layer->lease.n_pairs();
  }
  return pairs;
}

bool LeaseGroup::has_at_hand(std::int64_t pairs) const {
  if (pool_ == nullptr) return true;
  const auto at_hand = [&](Stream stream) {
    return pool_->n_available(stream) + pool_->n_reserved(stream, owner_);
  };
  if (!pool_->config().separate_kv) return 2 * pairs <= at_hand(Stream::kShared);
  return pairs <= std::min(at_hand(Stream::kKey), at_hand(Stream::kValue));
}

bool LeaseGroup::has_room_for(std::int64_t pairs) const {
  return StepReservation::has_room(*pool_, owner_, pairs);
}

void LeaseGroup::throw_exhausted(const core::Shortage& shortage, std::int64_t batch,
                                 std::int64_t n_tokens) const {
  const std::int64_t fitting = tokens_that_fit(
      n_tokens, [&](std::int64_t n) { return has_room_for(pairs_needed_tightened(batch, n)); });
  throw StepExhausted(step_message(shortage.message("PoolBackedKVCache::update_and_fetch"),
                                   n_tokens, std::ssize(layers_), fitting),
                      shortage, fitting);
}

void LeaseGroup::plan_step(std::int64_t batch, std::int64_t n_tokens) {
  close_step();
  halvings_ = 0;
  std::int64_t pairs = pool_ == nullptr ? 0 : pairs_needed(batch, n_tokens, 0);
  if (pairs > 0) {
    const std::int64_t least = pairs_needed(batch, n_tokens, BufferGrowth::kNoSpare);
    // Where the pool is short, spare rows leave as much as they take.
    const auto too_much = [&] {
      return halvings_ == 0 ? !has_room_for(pairs_to_follow(batch, n_tokens))
                            : !has_room_for(2 * pairs - least);
    };
    while (pairs > least && too_much()) pairs = pairs_needed(batch, n_tokens, ++halvings_);
    // One layer allocates for itself: nothing can come between.
    if (layers_.size() > 1) {
      auto shortage = reservation_.open(*pool_, owner_, pairs);
      if (shortage && pairs > least) {
        halvings_ = BufferGrowth::kNoSpare;
        shortage = reservation_.open(*pool_, owner_, least);
      }
      if (shortage) throw_exhausted(*shortage, batch, n_tokens);
    }
  }
}

void LeaseGroup::open_step() noexcept {
  for (const auto& layer : layers_) {
    layer->moved = false;
    layer->before = layer->now;
  }
  in_step_ = true;
  trim_round_ = {};
}

std::int64_t LeaseGroup::pairs_for(std::int64_t batch, std::int64_t rows) const noexcept {
  return pool_ == nullptr ? 0 : batch * pool_->blocks_for_tokens(rows);
}

void LeaseGroup::prepare(std::int64_t pairs, const char* call) {
  const std::lock_guard lock(mutex_);
  close_step();
  if (pool_ == nullptr || pairs <= 0) return;
  if (const auto shortage = reservation_.open(*pool_, owner_, pairs)) {
    throw StepExhausted(shortage->message(call), *shortage, 0);
  }
}

void LeaseGroup::close_step() noexcept {
  in_step_ = false;
  writing_ = nullptr;
  if (pool_ != nullptr) reservation_.close(*pool_, owner_);
}

void LeaseGroup::close_step_if_complete() noexcept {
  // The last layer first: it alone is looked at in most calls.
  if (in_step_ && writing_ == nullptr && (layers_.empty() || layers_.back()->moved) &&
      std::ranges::all_of(layers_, [](const auto& layer) { return layer->moved; })) {
    close_step();
  }
}

void LeaseGroup::end_step() {
  const std::lock_guard lock(mutex_);
  close_step();
}

void LeaseGroup::release() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& layer : layers_) {
    layer->lease.release();
    layer->now = layer->before = {};
    layer->moved = layer->trimmed = false;
  }
  close_step();
  trim_round_ = {};
}

void LeaseGroup::check_invariants() const {
  const std::lock_guard lock(mutex_);
  for (const auto& layer : layers_) {
    layer->lease.check_invariants();
    if (layer->lease.rows() != layer->now.rows || layer->lease.used() != layer->now.used()) {
      throw Error("[LeaseGroup::check_invariants] a lease does not follow its buffer");
    }
  }
}

}  // namespace kvpool::cache
