#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "block_record.h"
#include "block_table.h"
#include "kvpool/base/ids.h"

namespace kvpool::core {

/// The references of one owner to blocks of one stream, and what it may still draw.
struct OwnerList {
  Reference head = kNoReference;
  Reference tail = kNoReference;
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};

/// An active owner: one with blocks, a registration or a reservation.
struct OwnerRecord {
  OwnerId id = 0;
  /// References of a checkout with a lower serial are not this owner's, whatever their records say.
  /// The highest value while the slot is free.
  std::uint64_t first_serial = std::numeric_limits<std::uint64_t>::max();
  OwnerList lists[BlockTable::kListCount];
  /// Over its blocks; kept only while `shares` is false.
  std::int64_t fragmented = 0;
  std::int64_t unused_slots = 0;
  /// Registered by register_owner: outlives the last block.
  bool registered = false;
  /// May have extra references or blocks that others refer to, since a fork.
  bool shares = false;
  /// May have blocks that a reader has pinned.
  bool pinned = false;

  std::int64_t count() const noexcept { return std::int64_t{lists[0].count} + lists[1].count; }
  /// Its blocks may go back as one list, whatever their number.
  bool is_plain() const noexcept { return !shares && !pinned; }
  bool needed() const noexcept {
    return registered || (lists[0].count | lists[1].count | lists[0].reserved | lists[1].reserved);
  }
};

/// Active owners by id: an open-addressing map from id to slot with linear probing.
class OwnerTable {
 public:
  OwnerTable();

  OwnerRecord& operator[](std::uint32_t slot) noexcept { return slots_[slot]; }
  const OwnerRecord& operator[](std::uint32_t slot) const noexcept { return slots_[slot]; }
  /// Slots ever made, nobody's included.
  std::size_t size() const noexcept { return slots_.size(); }
  std::size_t active() const noexcept { return active_; }
  bool is_active(std::uint32_t slot) const noexcept {
    return slots_[slot].first_serial != std::numeric_limits<std::uint64_t>::max();
  }

  /// The slot of an active owner, kNoOwner for any other.
  std::uint32_t find(OwnerId id) const noexcept {
    if (slots_[last_].id == id && is_active(last_)) return last_;
    return find_slowly(id);
  }
  /// Makes room for one more owner; add then cannot fail.
  void make_room() {
    if ((free_ == kNoOwner && slots_.size() == slots_.capacity()) || is_half_full()) grow();
  }
  /// Makes an inactive owner active; `first_serial` is the next serial of the pool.
  std::uint32_t add(OwnerId id, std::uint64_t first_serial) noexcept;
  void remove(std::uint32_t slot) noexcept;

 private:
  std::size_t home(OwnerId id) const noexcept {
    return (static_cast<std::uint64_t>(id) * 0x9e37'79b9'7f4a'7c15u) >> shift_;
  }
  bool is_half_full() const noexcept { return (active_ + 1) * 2 > index_.size(); }
  std::uint32_t find_slowly(OwnerId id) const noexcept;
  void put(std::uint32_t slot) noexcept {
    const std::size_t mask = index_.size() - 1;
    std::size_t i = home(slots_[slot].id);
    while (index_[i] != kNoOwner) i = (i + 1) & mask;
    index_[i] = slot;
  }
  void grow();
  void rehash(int log2_size);

  std::vector<OwnerRecord> slots_;    // slot 0 is nobody's
  std::vector<std::uint32_t> index_;  // slots by hash, kNoOwner where empty; at most half full
  int shift_ = 0;                     // 64 - log2 of the index's size
  std::uint32_t free_ = kNoOwner;     // threaded through lists[0].head
  std::size_t active_ = 0;
  mutable std::uint32_t last_ = kNoOwner;  // found or added last
};

inline std::uint32_t OwnerTable::add(OwnerId id, std::uint64_t first_serial) noexcept {
  std::uint32_t slot = free_;
  if (slot != kNoOwner) {
    free_ = slots_[slot].lists[0].head;
    slots_[slot].lists[0].head = kNoReference;
  } else {
    slot = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back();
  }
  slots_[slot].id = id;
  slots_[slot].first_serial = first_serial;
  put(slot);
  ++active_;
  return last_ = slot;
}

inline void OwnerTable::remove(std::uint32_t slot) noexcept {
  const std::size_t mask = index_.size() - 1;
  std::size_t hole = home(slots_[slot].id);
  while (index_[hole] != slot) hole = (hole + 1) & mask;
  // Close the gap: move back each later entry of the run whose home is not past the hole.
  for (std::size_t i = (hole + 1) & mask; index_[i] != kNoOwner; i = (i + 1) & mask) {
    const std::size_t distance = (i - home(slots_[index_[i]].id)) & mask;
    if (distance >= ((i - hole) & mask)) {
      index_[hole] = index_[i];
      hole = i;
    }
  }
  index_[hole] = kNoOwner;
  slots_[slot] = OwnerRecord{};
  slots_[slot].lists[0].head = free_;
  free_ = slot;
  --active_;
}

}  // namespace kvpool::core
