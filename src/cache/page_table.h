#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/cache/page_view.h"
#include "kvpool/cache/paged_pool.h"
#include "kvpool/core/block_handle.h"
#include "kvpool/kernels/page_ref.h"
#include "kvpool/storage/page_slot.h"

namespace kvpool::cache {

/// Where a layer's blocks are: for each block_size tokens a key and a value block with a page each.
///
/// One layer writes it, under its group's lock; views read it, from any thread. While a view lives
/// the entries stay as they are and new ones come only behind them, within the capacity: whoever
/// has to change more works on a clone. A table that has views pins the blocks that they
/// show, and keeps the pins for the views of the next step: until its entries change, or the blocks
/// are freed behind the layer (see GroupRegistry).
///
/// The table holds pages; the blocks' references are the layer's.
class PageTable {
 public:
  struct Side {
    std::vector<kernels::PageRef> pages;
    std::vector<storage::SlotRef> slots;
    std::vector<std::uint8_t> levels;
  };

  /// Room for `capacity` entries.
  PageTable(std::shared_ptr<PagedPool> pool, std::int64_t capacity);
  ~PageTable();
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  /// A table of entries first .. last - 1 with room for `capacity` of them.
  std::shared_ptr<PageTable> clone(std::int64_t first, std::int64_t last,
                                   std::int64_t capacity) const;

  std::int64_t size() const noexcept {
    return static_cast<std::int64_t>(blocks_.size()) / 2 - begin_;
  }
  std::int64_t room() const noexcept {
    return capacity_ - static_cast<std::int64_t>(blocks_.size()) / 2;
  }
  /// Handles of entries first .. last - 1: key, value, key, ...
  std::span<const core::BlockHandle> blocks(std::int64_t first, std::int64_t last) const noexcept {
    return {blocks_.data() + 2 * (begin_ + first), static_cast<std::size_t>(2 * (last - first))};
  }
  std::span<const kernels::PageRef> pages(int stream, std::int64_t n) const noexcept {
    return {sides_[stream].pages.data() + begin_, static_cast<std::size_t>(n)};
  }
  const storage::SlotRef& slot(int stream, std::int64_t entry) const noexcept {
    return sides_[stream].slots[static_cast<std::size_t>(begin_ + entry)];
  }
  std::size_t level(int stream, std::int64_t entry) const noexcept {
    return sides_[stream].levels[static_cast<std::size_t>(begin_ + entry)];
  }
  /// Bytes of the pages, by size class.
  std::int64_t bytes() const noexcept { return bytes_; }

  /// Changes when an entry that was there does, and is no other table's: the entries that two looks
  /// at the same revision show are the same, as far as both go.
  std::uint64_t revision() const noexcept { return revision_; }

  /// False only if no view will read it again before the layer makes another.
  bool has_readers() const noexcept { return readers_.load(std::memory_order_acquire) != 0; }

  /// A new last entry; there is room.
  void push(const core::BlockHandle& key, const core::BlockHandle& value, storage::SlotRef key_page,
            storage::SlotRef value_page, formats::Format key_format,
            formats::Format value_format) noexcept;

  // Without readers only:

  void set_page(int stream, std::int64_t entry, storage::SlotRef page, std::size_t level,
                formats::Format format) noexcept;
  void set_blocks(std::int64_t entry, const core::BlockHandle& key,
                  const core::BlockHandle& value) noexcept;
  /// Keeps the first `n` entries.
  void cut(std::int64_t n) noexcept;
  /// Drops the first `n` entries.
  void drop_front(std::int64_t n) noexcept;

  /// A view's part. Throws InvalidArgument where a block is the layer's no more.
  void add_reader();
  void remove_reader() noexcept;
  /// No view will be made before the entries change: unpins the blocks when the last one is gone.
  void give_up_pins() noexcept;

 private:
  static std::uint64_t next_revision() noexcept;

  std::shared_ptr<PagedPool> pool_;  // the slots' store: first
  std::int64_t capacity_;
  /// Entries dropped from the front and not moved out yet.
  std::int64_t begin_ = 0;
  std::vector<core::BlockHandle> blocks_;
  Side sides_[2];
  std::int64_t bytes_ = 0;
  std::uint64_t revision_ = next_revision();
  std::atomic<std::uint32_t> readers_{0};
  // With the pool's readers_lock_:
  void unpin() noexcept;
  /// The first so many entries are pinned.
  std::int64_t n_pinned_ = 0;
  bool keeps_pins_ = true;
};

}  // namespace kvpool::cache
