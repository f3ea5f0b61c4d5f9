#include "kvpool/cache/paged_layer.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/methods/linear_map.h"
#include "page_table.h"

namespace kvpool::cache {

using core::BlockHandle;

namespace {

std::string in_call(const char* call) { return std::string("[PagedLayer::") + call + "] "; }

PagedLayerSpec checked(const PagedLayerSpec& spec) {
  const auto refuse = [](const char* what, std::int64_t got) {
    throw InvalidArgument(std::string("[PagedLayer] ") + what + ", got " + std::to_string(got));
  };
  if (spec.n_kv_heads < 1) refuse("n_kv_heads must be >= 1", spec.n_kv_heads);
  if (spec.key_dim < 1) refuse("key_dim must be >= 1", spec.key_dim);
  if (spec.value_dim < 1) refuse("value_dim must be >= 1", spec.value_dim);
  if (spec.window < 0) refuse("window must be >= 0", spec.window);
  return spec;
}

// The attention of layers with a codec has vectors of at most kMaxDims, the other stream's too.
void check_coded_dims(const PagedLayerSpec& spec) {
  for (const auto& [name, dim] :
       {std::pair{"key_dim", spec.key_dim}, {"value_dim", spec.value_dim}}) {
    if (dim <= methods::kMaxDims) continue;
    throw InvalidArgument(std::string("[PagedLayer] ") + name +
                          " must be <= " + std::to_string(methods::kMaxDims) +
                          " in a layer with a codec, got " + std::to_string(dim));
  }
}

}  // namespace

PagedLayer::PagedLayer(std::shared_ptr<PagedGroup> group, const PagedLayerSpec& spec)
    : group_(std::move(group)), spec_(checked(spec)) {
  const std::int64_t size = group_->pool()->block_size();
  layouts_[0] = std::make_shared<StreamLayout>(
      spec_.keys, formats::PageShape{spec_.n_kv_heads, size, spec_.key_dim}, "keys");
  layouts_[1] = std::make_shared<StreamLayout>(
      spec_.values, formats::PageShape{spec_.n_kv_heads, size, spec_.value_dim}, "values");
  if (layouts_[0]->has_codec() || layouts_[1]->has_codec()) check_coded_dims(spec_);
  for (int s = 0; s < 2; ++s) {
    for (const StreamLayout::Level& level : layouts_[s]->levels()) {
      tags_[s].push_back(blocks().intern_format(level.name));
    }
  }
}

PagedLayer::PagedLayer(std::shared_ptr<PagedGroup> group, const PagedLayer& origin)
    : group_(std::move(group)),
      spec_(origin.spec_),
      layouts_{origin.layouts_[0], origin.layouts_[1]},
      tags_{origin.tags_[0], origin.tags_[1]} {}

PagedLayer::~PagedLayer() {
  const std::lock_guard guard(group_->lock_);
  forget();
  const auto place = std::ranges::find(group_->layers_, this);
  if (place == group_->layers_.end()) return;  // never joined
  group_->layers_.erase(place);
  group_->n_moved_ -= moved_;
  group_->close_step_if_complete();
}

void PagedLayer::join() {
  const std::lock_guard guard(group_->lock_);
  group_->layers_.push_back(this);
}

// --- what it holds -------------------------------------------------------------------------------

std::int64_t PagedLayer::n_entries() const noexcept {
  return table_ == nullptr ? 0 : table_->size();
}

std::int64_t PagedLayer::page_bytes() const noexcept {
  return table_ == nullptr ? 0 : table_->bytes();
}

std::int64_t PagedLayer::offset() const {
  const std::lock_guard guard(group_->lock_);
  return offset_;
}

std::int64_t PagedLayer::length() const {
  const std::lock_guard guard(group_->lock_);
  return offset_ - first_block_ * block_size();
}

std::int64_t PagedLayer::first_position() const {
  const std::lock_guard guard(group_->lock_);
  return first_block_ * block_size();
}

std::int64_t PagedLayer::n_blocks() const {
  const std::lock_guard guard(group_->lock_);
  return 2 * n_entries();
}

std::int64_t PagedLayer::nbytes() const {
  const std::lock_guard guard(group_->lock_);
  return page_bytes();
}

bool PagedLayer::is_trimmable() const {
  const std::lock_guard guard(group_->lock_);
  return !window_closed();
}

bool PagedLayer::is_lost() const {
  const std::int64_t n = n_entries();
  return n > 0 && !blocks().info(table_->blocks(n - 1, n)[0]);
}

void PagedLayer::lost() const {
  table_->give_up_pins();
  throw LeaseLost("[PagedKVCache] the blocks of owner " + std::to_string(group_->owner_) +
                  " were freed behind the cache that holds them; release it to use it again");
}

void PagedLayer::verify() const {
  if (is_lost()) lost();
}

std::shared_ptr<const PageView> PagedLayer::view() const {
  const std::lock_guard guard(group_->lock_);
  verify();
  const std::int64_t n = n_entries();
  PageView::Stream streams[2];
  for (int s = 0; s < 2; ++s) {
    streams[s].layout = layouts_[s];
    if (n > 0) streams[s].pages = table_->pages(s, n);
  }
  const std::int64_t first = first_block_ * block_size();
  if (n == 0) return std::make_shared<PageView>(nullptr, streams[0], streams[1], first, offset_);
  try {
    table_->add_reader();
  } catch (const InvalidArgument&) {
    lost();  // some of them, at least
  }
  try {
    return std::make_shared<PageView>(table_, streams[0], streams[1], first, offset_);
  } catch (...) {
    table_->remove_reader();
    throw;
  }
}

// --- growth --------------------------------------------------------------------------------------

std::int64_t PagedLayer::new_entries(std::int64_t n_tokens) const noexcept {
  const std::int64_t blocks_after = (offset_ + n_tokens + block_size() - 1) / block_size();
  return blocks_after - first_block_ - n_entries();
}

PagedLayer::Tail PagedLayer::inspect_tail(bool known_shared) const {
  Tail tail;
  const std::int64_t first = offset_ % block_size();
  if (first == 0) return tail;
  const std::int64_t last = n_entries() - 1;
  const bool readers = table_->has_readers();
  bool alone = true;
  for (int s = 0; s < 2; ++s) {
    const storage::SlotRef& slot = table_->slot(s, last);
    const bool slot_alone = slot.is_alone();
    alone &= slot_alone;
    tail.renew[s] =
        table_->level(s, last) != 0 || (first < slot.seen() && (readers || !slot_alone));
  }
  tail.shared = known_shared;
  if (!alone && !known_shared) {
    // A fork holds the page, or only a plan or an older table.
    const auto info = blocks().info(table_->blocks(last, last + 1)[0]);
    if (!info) lost();
    tail.shared = info->n_references > 1;
  }
  if (tail.shared) tail.renew[0] = tail.renew[1] = true;
  return tail;
}

void PagedLayer::add_demand(std::int64_t n_tokens, PagedGroup::Demand& demand) const {
  const std::int64_t fresh = new_entries(n_tokens);
  const Tail tail = inspect_tail();
  demand.pairs += fresh + tail.shared;
  demand.copies |= tail.shared;
  for (int s = 0; s < 2; ++s) {
    demand.add_slots(layouts_[s]->level(0).page_bytes, fresh + tail.renew[s]);
  }
}

std::shared_ptr<const AppendPlan> PagedLayer::append(std::int64_t n_tokens) {
  if (n_tokens < 1) {
    throw InvalidArgument(in_call("append") + "n_tokens must be >= 1, got " +
                          std::to_string(n_tokens));
  }
  PagedGroup& group = *group_;
  const std::lock_guard guard(group.lock_);
  if (offset_ > kMostTokens - n_tokens) {
    throw InvalidArgument(in_call("append") + "n_tokens must lead to no more than 2^48, got " +
                          std::to_string(n_tokens) + " after " + std::to_string(offset_));
  }
  if (moved_ && group.in_step_) {
    if (group.torn()) {
      group.undo_step();
    } else {
      group.close_step();  // what has not moved since was left out
    }
  }
  const bool opens = !group.in_step_;
  const std::int64_t before = offset_;
  std::shared_ptr<AppendPlan> plan;
  if (opens) {
    verify();
    group.plan_step(n_tokens);
  }
  try {
    plan = grow(n_tokens);
  } catch (...) {
    if (opens) group.close_step();
    throw;
  }
  if (opens) group.open_step();
  drop_behind_window(before);
  before_ = before;
  moved_ = true;
  ++group.n_moved_;
  group.close_step_if_complete();
  return plan;
}

// A table with room for `more` entries; where entries are to change, one without readers.
std::shared_ptr<PageTable> PagedLayer::table_for(std::int64_t more, bool to_change) const {
  constexpr std::int64_t kFirst = 8;
  const std::int64_t n = n_entries();
  if (table_ == nullptr) {
    return more == 0 ? nullptr : std::make_shared<PageTable>(group_->pool_, std::max(more, kFirst));
  }
  if (table_->room() >= more && !(to_change && table_->has_readers())) return table_;
  return table_->clone(0, n, n + std::max({more, n / 2, kFirst}));
}

// What the last block's handles, own, become; it is charged first of all and not undone.
void PagedLayer::charge_tail(const Tail& tail, std::int64_t n_used, BlockHandle (&own)[2]) {
  const std::int64_t last = n_entries() - 1;
  const auto held = table_->blocks(last, last + 1);
  if (tail.shared) {
    if (const auto shortage = blocks().try_writable(held, own)) {
      group_->throw_exhausted(*shortage, 1);
    }
  } else {
    std::ranges::copy(held, own);
  }
  blocks().mark_used(own, n_used);
  for (int s = 0; s < 2; ++s) {
    if (table_->level(s, last) != 0 && tail.renew[s]) blocks().set_format(own[s], tags_[s][0]);
  }
}

std::shared_ptr<AppendPlan> PagedLayer::grow(std::int64_t n_tokens, bool known_shared) {
  const std::int64_t size = block_size();
  const std::int64_t first = offset_ % size;
  const std::int64_t end = offset_ + n_tokens;
  const std::int64_t entries = n_entries();
  const std::int64_t fresh = new_entries(n_tokens);
  const Tail tail = inspect_tail(known_shared);
  if (first == 0) verify();  // otherwise charging the tail does

  // Memory for the books, slots, blocks; then nothing fails.
  auto plan = std::make_shared<AppendPlan>(group_->pool_, n_tokens);
  AppendPlan::StreamPlan* const plans[2] = {&plan->keys_, &plan->values_};
  std::vector<storage::SlotRef> slots[2];
  for (int s = 0; s < 2; ++s) {
    plans[s]->layout = layouts_[s];
    plans[s]->pieces.reserve(static_cast<std::size_t>(fresh + (first > 0)));
    plans[s]->copies.reserve(tail.renew[s]);
    slots[s].resize(static_cast<std::size_t>(fresh + tail.renew[s]));
  }
  std::shared_ptr<PageTable> table = table_for(fresh, tail.any());
  for (int s = 0; s < 2; ++s) {
    const std::int64_t page_bytes = layouts_[s]->level(0).page_bytes;
    if (const auto shortage = group_->take_slots(page_bytes, slots[s])) {
      group_->throw_exhausted(*shortage, n_tokens);
    }
  }
  std::vector<BlockHandle> handles(static_cast<std::size_t>(2 * fresh));
  const auto keys = std::span(handles).first(static_cast<std::size_t>(fresh));
  const auto values = std::span(handles).last(static_cast<std::size_t>(fresh));
  if (fresh > 0) {
    const std::int64_t first_new = (first_block_ + entries) * size;
    if (const auto shortage = blocks().try_allocate_kv(end - first_new, group_->owner_, tags_[0][0],
                                                       tags_[1][0], keys, values)) {
      group_->throw_exhausted(*shortage, n_tokens);
    }
  }
  BlockHandle own[2];
  if (first > 0) {
    try {
      charge_tail(tail, std::min(size, first + n_tokens), own);
    } catch (...) {
      blocks().free(handles);
      const auto info = blocks().info(table_->blocks(entries - 1, entries)[0]);
      if (!info) lost();
      // Shared by somebody who forked the owner's blocks in the pool.
      if (info->n_references == 1 || tail.shared) throw;
      for (auto& taken : slots) taken.clear();
      return grow(n_tokens, true);
    }
  }
  group_->reservation_.note_taken(fresh + tail.shared);
  fill_lags_ = false;

  table_ = std::move(table);
  if (first > 0) {
    const std::int64_t last = entries - 1;
    if (tail.shared) table_->set_blocks(last, own[0], own[1]);
    for (int s = 0; s < 2; ++s) {
      if (!tail.renew[s]) continue;
      const auto level = static_cast<std::uint8_t>(table_->level(s, last));
      plans[s]->copies.push_back({table_->slot(s, last), slots[s].back(), level, 0, first});
      table_->set_page(s, last, std::move(slots[s].back()), 0, layouts_[s]->level(0).ref_format());
    }
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(fresh); ++i) {
    table_->push(keys[i], values[i], std::move(slots[0][i]), std::move(slots[1][i]),
                 layouts_[0]->level(0).ref_format(), layouts_[1]->level(0).ref_format());
  }
  std::int64_t row = 0;
  for (std::int64_t entry = first > 0 ? entries - 1 : entries; row < n_tokens; ++entry) {
    const std::int64_t slot = row == 0 ? first : 0;
    const std::int64_t count = std::min(size - slot, n_tokens - row);
    for (int s = 0; s < 2; ++s) {
      plans[s]->pieces.push_back({table_->slot(s, entry), slot, count, row});
      table_->slot(s, entry).set_seen(slot + count);
    }
    row += count;
  }
  offset_ = end;
  demote(*plan);
  return plan;
}

// --- shrinking -----------------------------------------------------------------------------------

// Blocks that no query from `position` on sees: of the step that has come, not the next one, which
// may follow after this one is rolled back. Whether there were any.
bool PagedLayer::drop_behind_window(std::int64_t position) noexcept {
  if (spec_.window == 0) return false;
  const std::int64_t first_seen = position - spec_.window + 1;
  const std::int64_t n =
      std::min(std::max<std::int64_t>(first_seen, 0) / block_size() - first_block_, n_entries());
  if (n <= 0) return false;
  try {
    std::shared_ptr<PageTable> table = table_;
    if (table_->has_readers()) table = table_->clone(n, n_entries(), n_entries() + n);
    table_->give_up_pins();
    blocks().free(table_->blocks(0, n));
    if (table == table_) {
      table_->drop_front(n);
    } else {
      table_ = std::move(table);
    }
    first_block_ += n;
    return true;
  } catch (...) {
    return false;  // out of memory: they go another time
  }
}

// Keeps the tokens before `new_offset`, which is not behind what the layer holds.
void PagedLayer::cut(std::int64_t new_offset) {
  if (new_offset == offset_) return;
  verify();
  const std::int64_t size = block_size();
  const std::int64_t entries = n_entries();
  const std::int64_t kept = (new_offset + size - 1) / size - first_block_;
  if (kept < entries) {
    std::shared_ptr<PageTable> table = table_;
    if (kept == 0) {
      table = nullptr;
    } else if (table_->has_readers()) {
      table = table_->clone(0, kept, kept + kept / 2 + 1);
    }
    table_->give_up_pins();
    blocks().free(table_->blocks(kept, entries));
    if (table == table_) {
      table_->cut(kept);
    } else {
      table_ = std::move(table);
    }
  }
  if (kept > 0 && new_offset % size != 0) {
    try {
      blocks().mark_used(table_->blocks(kept - 1, kept), new_offset % size);
      fill_lags_ = false;
    } catch (const InvalidArgument&) {
      fill_lags_ = true;  // another owner's too, who uses more of it
    }
  }
  offset_ = new_offset;
  if (new_offset == 0) first_block_ = 0;
  // A block that is cut into is written anew in the recent format, and ages from there.
  for (Ageing& ageing : ageing_) ageing = {std::min(ageing.done, new_offset / size), -1, false};
}

std::int64_t PagedLayer::trim(std::int64_t n_tokens) {
  if (n_tokens < 0) {
    throw InvalidArgument(in_call("trim") + "n must be >= 0, got " + std::to_string(n_tokens));
  }
  PagedGroup& group = *group_;
  const std::lock_guard guard(group.lock_);
  if (group.torn()) group.undo_step();
  if (window_closed()) return 0;
  verify();
  group.close_step();
  TrimRound& round = group.trim_round_;
  if (round.asked != n_tokens || trimmed_) {
    round = {n_tokens, n_tokens};
    for (PagedLayer* layer : group.layers_) {
      layer->trimmed_ = false;
      if (layer->window_closed()) round.granted = 0;
      if (layer->offset_ > 0) round.granted = std::min(round.granted, layer->offset_);
    }
  }
  const std::int64_t dropped = std::min(round.granted, offset_);
  cut(offset_ - dropped);
  before_ = offset_;
  moved_ = false;
  trimmed_ = true;
  return dropped;
}

bool PagedLayer::is_torn() const {
  const std::lock_guard guard(group_->lock_);
  return moved_ && group_->torn();
}

void PagedLayer::settle() {
  const std::lock_guard guard(group_->lock_);
  if (moved_ && group_->torn()) group_->undo_step();
}

std::int64_t PagedLayer::most_to_roll_back() const {
  const std::lock_guard guard(group_->lock_);
  return rollable();
}

void PagedLayer::roll_back(std::int64_t n_tokens) {
  const std::lock_guard guard(group_->lock_);
  const std::int64_t most = rollable();
  if (n_tokens < 0 || n_tokens > most) {
    throw InvalidArgument(in_call("roll_back") + "n_tokens must be in 0.." + std::to_string(most) +
                          ", got " + std::to_string(n_tokens));
  }
  cut(offset_ - n_tokens);
  before_ = std::min(before_, offset_);
}

void PagedLayer::reset() noexcept {
  const std::lock_guard guard(group_->lock_);
  forget();
}

void PagedLayer::forget() noexcept {
  if (table_ != nullptr) {
    table_->give_up_pins();
    try {
      blocks().free(table_->blocks(0, n_entries()));
    } catch (...) {  // NOLINT(bugprone-empty-catch)
      // Own handles are never refused; what else can fail must not leave a destructor.
    }
    table_.reset();
  }
  offset_ = first_block_ = before_ = 0;
  trimmed_ = fill_lags_ = false;
  if (std::exchange(moved_, false) && group_->in_step_) --group_->n_moved_;
  for (Ageing& ageing : ageing_) ageing = {};
}

// --- copies --------------------------------------------------------------------------------------

std::unique_ptr<PagedLayer> PagedLayer::fork(const std::shared_ptr<PagedGroup>& group) const {
  if (group == nullptr || group->pool() != group_->pool()) {
    throw InvalidArgument(in_call("fork") + "group must be of the same pool");
  }
  std::unique_ptr<PagedLayer> copy(new PagedLayer(group, *this));
  bool in_step = false;
  {
    const std::lock_guard guard(group_->lock_);
    verify();
    if (const std::int64_t n = n_entries(); n > 0) {
      auto table = table_->clone(0, n, n + n / 8 + 1);
      const auto held = table_->blocks(0, n);
      std::vector<BlockHandle> own(held.size());
      try {
        blocks().share(held, group->owner_, own);
      } catch (const InvalidArgument&) {
        lost();
      }
      for (std::int64_t i = 0; i < n; ++i) {
        table->set_blocks(i, own[static_cast<std::size_t>(2 * i)],
                          own[static_cast<std::size_t>(2 * i + 1)]);
      }
      copy->table_ = std::move(table);
    }
    copy->offset_ = offset_;
    copy->first_block_ = first_block_;
    copy->before_ = before_;
    copy->fill_lags_ = fill_lags_;
    copy->ageing_[0] = ageing_[0];
    copy->ageing_[1] = ageing_[1];
    in_step = group_->in_step_ && group_->torn();
    copy->moved_ = in_step && moved_;
  }
  copy->join();
  if (in_step) {
    // A torn step stays torn in the copy, and is undone there when it is next used.
    const std::lock_guard guard(group->lock_);
    group->in_step_ = true;
    group->n_moved_ += copy->moved_;
  }
  return copy;
}

void PagedLayer::check_invariants() const {
  const auto require = [](bool holds, const char* book) {
    if (!holds) throw Error(std::string("[PagedLayer::check_invariants] ") + book);
  };
  const std::int64_t size = block_size();
  const std::int64_t n = n_entries();
  require(offset_ >= first_block_ * size, "the offset is behind the blocks kept");
  require(n == (offset_ + size - 1) / size - first_block_, "blocks do not match the tokens");
  require(before_ <= offset_, "the step before is ahead");
  std::int64_t bytes = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t used = std::min(size, offset_ - (first_block_ + i) * size);
    for (int s = 0; s < 2; ++s) {
      const storage::SlotRef& slot = table_->slot(s, i);
      const std::size_t level = table_->level(s, i);
      const kernels::PageRef& page = table_->pages(s, n)[static_cast<std::size_t>(i)];
      bytes += static_cast<std::int64_t>(slot.size());
      require(page.data == slot.data() && page.format == layouts_[s]->level(level).ref_format(),
              "a page is not where the table says");
      require(static_cast<std::int64_t>(slot.size()) ==
                  storage::PageStore::class_size(layouts_[s]->level(level).page_bytes),
              "a page has another level's size");
      require(slot.seen() >= used, "a token is there that nobody may have seen");
      const auto info = blocks().info(table_->blocks(i, i + 1)[static_cast<std::size_t>(s)]);
      if (!info) continue;  // lost: the next use says so
      require(info->owner == group_->owner_, "a block is another owner's");
      require(info->n_references > 1 || info->n_used == used ||
                  (fill_lags_ && i == n - 1 && info->n_used > used),
              "n_used of a block does not follow the tokens");
      require(info->format == tags_[s][level], "a block's format is not its page's");
    }
  }
  require(bytes == page_bytes(), "bytes do not add up");
}

}  // namespace kvpool::cache
