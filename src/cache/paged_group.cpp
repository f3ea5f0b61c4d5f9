#include "kvpool/cache/paged_group.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "group_registry.h"
#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"
#include "kvpool/cache/paged_layer.h"
#include "page_table.h"

namespace kvpool::cache {

namespace {
constexpr const char* kCall = "PagedKVCache::update_and_fetch";
}

PagedGroup::PagedGroup(std::shared_ptr<PagedPool> pool, OwnerId owner)
    : pool_(std::move(pool)), owner_(owner) {
  if (pool_ == nullptr) throw InvalidArgument("[PagedGroup] pool must not be null");
  pool_->groups_->add(this);
}

PagedGroup::~PagedGroup() {
  pool_->groups_->remove(this);
  close_step();
}

std::int64_t PagedGroup::n_layers() const {
  const std::lock_guard guard(lock_);
  return static_cast<std::int64_t>(layers_.size());
}

std::int64_t PagedGroup::n_blocks() const {
  const std::lock_guard guard(lock_);
  std::int64_t n = 0;
  for (const PagedLayer* layer : layers_) n += 2 * layer->n_entries();
  return n;
}

std::int64_t PagedGroup::nbytes() const {
  const std::lock_guard guard(lock_);
  std::int64_t n = 0;
  for (const PagedLayer* layer : layers_) n += layer->page_bytes();
  return n;
}

std::unique_ptr<PagedLayer> PagedGroup::add_layer(const PagedLayerSpec& spec) {
  std::unique_ptr<PagedLayer> layer(new PagedLayer(shared_from_this(), spec));
  layer->join();
  return layer;
}

std::vector<std::unique_ptr<PagedLayer>> PagedGroup::fork(std::optional<OwnerId> owner) {
  std::vector<PagedLayer*> origins;
  {
    const std::lock_guard guard(lock_);
    origins = layers_;
  }
  const auto group =
      std::make_shared<PagedGroup>(pool_, owner ? *owner : pool_->blocks().new_owner());
  std::vector<std::unique_ptr<PagedLayer>> copies;
  copies.reserve(origins.size());
  for (const PagedLayer* origin : origins) copies.push_back(origin->fork(group));
  return copies;
}

void PagedGroup::roll_back_step() {
  const std::lock_guard guard(lock_);
  if (in_step_) undo_step();
}

void PagedGroup::release() noexcept {
  const std::lock_guard guard(lock_);
  for (PagedLayer* layer : layers_) layer->forget();
  close_step();
  trim_round_ = {};
}

void PagedGroup::give_up_pins_if_lost() noexcept {
  if (!lock_.try_lock()) return;
  const std::lock_guard guard(lock_, std::adopt_lock);
  for (const PagedLayer* layer : layers_) {
    if (layer->n_entries() == 0) continue;
    if (!layer->is_lost()) return;  // its blocks are there, so are those of the others
    layer->table_->give_up_pins();
  }
}

bool PagedGroup::torn() const noexcept {
  if (!in_step_) return false;
  return stopped_half_way(layers_, [](const PagedLayer* layer) { return layer->moved_; });
}

void PagedGroup::Demand::add_slots(std::int64_t page_bytes, std::int64_t n) {
  if (n == 0) return;
  const auto known =
      std::ranges::find(slots, page_bytes, &std::pair<std::int64_t, std::int64_t>::first);
  if (known != slots.end()) {
    known->second += n;
  } else {
    slots.emplace_back(page_bytes, n);
  }
}

PagedGroup::Demand PagedGroup::demand(std::int64_t n_tokens) const {
  Demand total;
  for (const PagedLayer* layer : layers_) layer->add_demand(n_tokens, total);
  return total;
}

// A guess: other owners may come in between.
bool PagedGroup::fits(std::int64_t n_tokens) const {
  const Demand need = demand(n_tokens);
  std::int64_t left = pool_->store().available_bytes();
  for (const auto& [page_bytes, n] : need.slots) {
    const std::int64_t size = storage::PageStore::class_size(page_bytes);
    if (n > left / size) return false;
    left -= n * size;
  }
  return need.pairs == 0 || StepReservation::has_room(pool_->blocks(), owner_, need.pairs);
}

std::int64_t PagedGroup::less_that_fits(std::int64_t n_tokens) const {
  return tokens_that_fit(n_tokens, [&](std::int64_t n) { return fits(n); });
}

void PagedGroup::throw_exhausted(const core::Shortage& shortage, std::int64_t n_tokens) {
  const std::int64_t fitting = less_that_fits(n_tokens);
  throw StepExhausted(step_message(shortage.message(kCall), n_tokens, std::ssize(layers_), fitting),
                      shortage, fitting);
}

void PagedGroup::throw_exhausted(const storage::ByteShortage& shortage, std::int64_t n_tokens) {
  const std::int64_t fitting = less_that_fits(n_tokens);
  throw StepExhausted(step_message(std::string("[") + kCall + "] " + shortage.message(), n_tokens,
                                   std::ssize(layers_), fitting),
                      shortage, owner_, fitting);
}

void PagedGroup::make_room_behind_windows(std::int64_t n_tokens) {
  const auto windowed = [](const PagedLayer* layer) { return layer->spec_.window > 0; };
  if (std::ranges::none_of(layers_, windowed) || fits(n_tokens)) return;
  for (PagedLayer* layer : layers_) {
    if (layer->drop_behind_window(layer->offset_)) layer->before_ = layer->offset_;
  }
}

void PagedGroup::plan_step(std::int64_t n_tokens) {
  close_step();
  make_room_behind_windows(n_tokens);
  const Demand need = demand(n_tokens);
  // A single layer that only adds blocks allocates them in one call: nothing can come between. But
  // for a count of tokens that no pool has room for, no memory is to be asked either.
  constexpr std::int64_t kFewPairs = 4096;
  if (need.pairs > 0 && (layers_.size() > 1 || need.copies || need.pairs > kFewPairs)) {
    if (const auto shortage = reservation_.open(pool_->blocks(), owner_, need.pairs)) {
      throw_exhausted(*shortage, n_tokens);
    }
  }
  try {
    purse_.reserve(need.slots.size());
    for (const auto& [page_bytes, n] : need.slots) {
      Purse& purse = purse_.emplace_back(
          page_bytes, std::vector<storage::SlotRef>(static_cast<std::size_t>(n)));
      if (const auto shortage = pool_->store().try_take(page_bytes, purse.slots)) {
        close_step();
        throw_exhausted(*shortage, n_tokens);
      }
    }
  } catch (...) {
    close_step();
    throw;
  }
}

std::optional<storage::ByteShortage> PagedGroup::take_slots(std::int64_t page_bytes,
                                                            std::span<storage::SlotRef> out) {
  for (Purse& purse : purse_) {
    if (purse.page_bytes != page_bytes) continue;
    const std::size_t n = std::min(out.size(), purse.slots.size());
    std::move(purse.slots.end() - static_cast<std::ptrdiff_t>(n), purse.slots.end(), out.begin());
    purse.slots.resize(purse.slots.size() - n);
    out = out.subspan(n);
  }
  return pool_->store().try_take(page_bytes, out);
}

void PagedGroup::open_step() noexcept {
  for (PagedLayer* layer : layers_) {
    layer->moved_ = false;
    layer->before_ = layer->offset_;
  }
  in_step_ = true;
  n_moved_ = 0;
  trim_round_ = {};
}

void PagedGroup::close_step() noexcept {
  in_step_ = false;
  purse_.clear();
  reservation_.close(pool_->blocks(), owner_);
}

void PagedGroup::close_step_if_complete() noexcept {
  if (in_step_ && n_moved_ == static_cast<std::int64_t>(layers_.size())) close_step();
}

void PagedGroup::undo_step() {
  close_step();
  for (PagedLayer* layer : layers_) {
    if (!layer->moved_) continue;
    layer->cut(layer->before_);
    layer->moved_ = false;
  }
  n_moved_ = 0;
}

void PagedGroup::check_invariants() const {
  const std::lock_guard guard(lock_);
  std::int64_t n_moved = 0;
  for (const PagedLayer* layer : layers_) {
    layer->check_invariants();
    n_moved += layer->moved_;
  }
  if (in_step_ && n_moved != n_moved_) {
    throw Error("[PagedGroup::check_invariants] layers that moved do not add up");
  }
  if (!in_step_ && !purse_.empty()) {
    throw Error("[PagedGroup::check_invariants] slots are kept for no step");
  }
}

}  // namespace kvpool::cache
