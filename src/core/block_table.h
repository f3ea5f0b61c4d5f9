#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "block_record.h"

namespace kvpool::core {

/// The free blocks of one stream, the block freed last on top, and what is promised of them.
struct FreeList {
  std::uint32_t top = kNoReference;
  std::int64_t count = 0;
  std::int64_t reserved = 0;  // over all owners, <= count
  std::int64_t managed = 0;   // free and in use
};

/// Every block's record, and the free lists that are threaded through them.
class BlockTable {
 public:
  static constexpr int kListCount = 2;
  static constexpr std::int64_t kMaxIds = std::int64_t{1} << 32;

  /// `first_id` is 0 but in tests.
  explicit BlockTable(std::int64_t first_id = 0) : next_id_(first_id) {}

  BlockRecord& operator[](std::uint32_t index) noexcept { return records_[index]; }
  const BlockRecord& operator[](std::uint32_t index) const noexcept { return records_[index]; }
  /// Records ever made: the bound of valid indices. Never falls.
  std::uint32_t size() const noexcept { return size_; }
  std::int64_t next_id() const noexcept { return next_id_; }
  std::int64_t managed() const noexcept { return lists_[0].managed + lists_[1].managed; }
  /// Blocks that can still be minted: ids and indices both run out.
  std::int64_t mintable() const noexcept {
    return std::min(kMaxIds - next_id_, kMaxReferences - managed());
  }

  FreeList& list(int index) noexcept { return lists_[index]; }
  const FreeList& list(int index) const noexcept { return lists_[index]; }

  /// Makes room for `n` more blocks; mint then cannot fail.
  void make_room(std::int64_t n);
  /// Puts `n` <= mintable() new blocks on a free list, in ascending ids.
  void mint(int list, Stream stream, std::int64_t n) noexcept;

  void push(int list, std::uint32_t index) noexcept {
    records_[index].links.prev = lists_[list].top;
    lists_[list].top = index;
    ++lists_[list].count;
  }
  /// Takes `n` >= 0 blocks off the list: never-used ones first, then the coldest, and calls
  /// `retired(index)` for each before its record may be used again.
  template <typename Callback>
  void retire(int list, std::int64_t n, Callback&& retired);

  /// Retired records that wait for a new id.
  std::uint32_t retired_top() const noexcept { return retired_; }

 private:
  std::vector<BlockRecord> records_;
  std::uint32_t size_ = 0;  // of records_, without a vector's division by 40
  FreeList lists_[kListCount];
  std::uint32_t retired_ = kNoReference;  // threaded through links.prev
  std::int64_t n_retired_ = 0;
  std::int64_t next_id_;
};

template <typename Callback>
void BlockTable::retire(int list, std::int64_t n, Callback&& retired) {
  if (n == 0) return;
  FreeList& free = lists_[list];
  std::int64_t fresh = 0;
  for (std::uint32_t i = free.top; i != kNoReference; i = records_[i].links.prev) {
    fresh += !records_[i].ever_allocated;
  }
  // From the top down, what is kept comes first: of the used ones all but n - fresh, of the fresh
  // ones all but n.
  std::int64_t keep_fresh = std::max<std::int64_t>(fresh - n, 0);
  std::int64_t keep_used = free.count - fresh - std::max<std::int64_t>(n - fresh, 0);
  std::uint32_t* link = &free.top;
  while (*link != kNoReference) {
    const std::uint32_t index = *link;
    BlockRecord& record = records_[index];
    std::int64_t& keep = record.ever_allocated ? keep_used : keep_fresh;
    if (keep > 0) {
      --keep;
      link = &record.links.prev;
      continue;
    }
    *link = record.links.prev;
    retired(index);
    record.retired = true;
    record.links = {kNoOwner, retired_, kNoReference};
    retired_ = index;
    ++n_retired_;
    --free.count;
    --free.managed;
  }
}

}  // namespace kvpool::core
