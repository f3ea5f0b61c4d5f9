#include "page_table.h"

#include <mutex>
#include <utility>

namespace kvpool::cache {

PageTable::PageTable(std::shared_ptr<PagedPool> pool, std::int64_t capacity)
    : pool_(std::move(pool)), capacity_(capacity) {
  const auto n = static_cast<std::size_t>(capacity);
  blocks_.reserve(2 * n);
  for (Side& side : sides_) {
    side.pages.reserve(n);
    side.slots.reserve(n);
    side.levels.reserve(n);
  }
}

PageTable::~PageTable() { give_up_pins(); }

std::uint64_t PageTable::next_revision() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<PageTable> PageTable::clone(std::int64_t first_entry, std::int64_t last_entry,
                                            std::int64_t capacity) const {
  auto copy = std::make_shared<PageTable>(pool_, capacity);
  const auto kept = blocks(first_entry, last_entry);
  copy->blocks_.assign(kept.begin(), kept.end());
  for (int s = 0; s < 2; ++s) {
    const auto first = static_cast<std::ptrdiff_t>(begin_ + first_entry);
    const auto last = static_cast<std::ptrdiff_t>(begin_ + last_entry);
    const Side& from = sides_[s];
    Side& to = copy->sides_[s];
    to.pages.assign(from.pages.begin() + first, from.pages.begin() + last);
    to.slots.assign(from.slots.begin() + first, from.slots.begin() + last);
    to.levels.assign(from.levels.begin() + first, from.levels.begin() + last);
    for (const storage::SlotRef& slot : to.slots) {
      copy->bytes_ += static_cast<std::int64_t>(slot.size());
    }
  }
  return copy;
}

void PageTable::push(const core::BlockHandle& key, const core::BlockHandle& value,
                     storage::SlotRef key_page, storage::SlotRef value_page,
                     formats::Format key_format, formats::Format value_format) noexcept {
  blocks_.push_back(key);
  blocks_.push_back(value);
  const auto add = [this](Side& side, storage::SlotRef&& page, formats::Format format) {
    bytes_ += static_cast<std::int64_t>(page.size());
    side.pages.push_back({page.data(), format});
    side.slots.push_back(std::move(page));
    side.levels.push_back(0);
  };
  add(sides_[0], std::move(key_page), key_format);
  add(sides_[1], std::move(value_page), value_format);
}

void PageTable::set_page(int stream, std::int64_t entry, storage::SlotRef page, std::size_t level,
                         formats::Format format) noexcept {
  Side& side = sides_[stream];
  const auto at = static_cast<std::size_t>(begin_ + entry);
  bytes_ +=
      static_cast<std::int64_t>(page.size()) - static_cast<std::int64_t>(side.slots[at].size());
  side.pages[at] = {page.data(), format};
  side.slots[at] = std::move(page);
  side.levels[at] = static_cast<std::uint8_t>(level);
  revision_ = next_revision();
}

void PageTable::set_blocks(std::int64_t entry, const core::BlockHandle& key,
                           const core::BlockHandle& value) noexcept {
  give_up_pins();
  const auto at = static_cast<std::size_t>(2 * (begin_ + entry));
  blocks_[at] = key;
  blocks_[at + 1] = value;
}

void PageTable::cut(std::int64_t n) noexcept {
  const auto kept = static_cast<std::size_t>(begin_ + n);
  for (Side& side : sides_) {
    for (std::size_t i = kept; i < side.slots.size(); ++i) {
      bytes_ -= static_cast<std::int64_t>(side.slots[i].size());
    }
    side.pages.resize(kept);
    side.slots.resize(kept);
    side.levels.resize(kept);
  }
  blocks_.resize(2 * kept);
  revision_ = next_revision();
}

void PageTable::drop_front(std::int64_t n) noexcept {
  for (Side& side : sides_) {
    for (std::int64_t i = begin_; i < begin_ + n; ++i) {
      storage::SlotRef& slot = side.slots[static_cast<std::size_t>(i)];
      bytes_ -= static_cast<std::int64_t>(slot.size());
      slot.reset();
    }
  }
  begin_ += n;
  revision_ = next_revision();
  // Moving the rest costs no more than what was dropped since.
  if (begin_ < size()) return;
  const auto dead = static_cast<std::ptrdiff_t>(begin_);
  blocks_.erase(blocks_.begin(), blocks_.begin() + 2 * dead);
  for (Side& side : sides_) {
    side.pages.erase(side.pages.begin(), side.pages.begin() + dead);
    side.slots.erase(side.slots.begin(), side.slots.begin() + dead);
    side.levels.erase(side.levels.begin(), side.levels.begin() + dead);
  }
  begin_ = 0;
}

void PageTable::add_reader() {
  const std::lock_guard guard(pool_->readers_lock_);
  if (const std::int64_t n = size(); n_pinned_ < n) {
    pool_->blocks().pin(blocks(n_pinned_, n));
    n_pinned_ = n;
  }
  keeps_pins_ = true;
  readers_.store(readers_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void PageTable::remove_reader() noexcept {
  const std::lock_guard guard(pool_->readers_lock_);
  const std::uint32_t readers = readers_.load(std::memory_order_relaxed) - 1;
  if (readers == 0 && !keeps_pins_) unpin();
  readers_.store(readers, std::memory_order_release);
}

void PageTable::give_up_pins() noexcept {
  const std::lock_guard guard(pool_->readers_lock_);
  keeps_pins_ = false;
  if (readers_.load(std::memory_order_relaxed) == 0) unpin();
}

void PageTable::unpin() noexcept {
  if (n_pinned_ == 0) return;
  try {
    pool_->blocks().unpin(blocks(0, n_pinned_));
  } catch (...) {  // NOLINT(bugprone-empty-catch)
    // What was pinned here is not refused, and a view's end must not throw.
  }
  n_pinned_ = 0;
}

}  // namespace kvpool::cache
