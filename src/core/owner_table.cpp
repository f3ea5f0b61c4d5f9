#include "owner_table.h"

#include <algorithm>

namespace kvpool::core {

namespace {
constexpr int kFirstLog2Size = 4;
}

OwnerTable::OwnerTable() : slots_(1) { rehash(kFirstLog2Size); }

std::uint32_t OwnerTable::find_slowly(OwnerId id) const noexcept {
  const std::size_t mask = index_.size() - 1;
  for (std::size_t i = home(id);; i = (i + 1) & mask) {
    const std::uint32_t slot = index_[i];
    if (slot == kNoOwner) return kNoOwner;
    if (slots_[slot].id == id) return last_ = slot;
  }
}

void OwnerTable::put(std::uint32_t slot) noexcept {
  const std::size_t mask = index_.size() - 1;
  std::size_t i = home(slots_[slot].id);
  while (index_[i] != kNoOwner) i = (i + 1) & mask;
  index_[i] = slot;
}

void OwnerTable::rehash(int log2_size) {
  std::vector<std::uint32_t> fresh(std::size_t{1} << log2_size, kNoOwner);
  index_.swap(fresh);
  shift_ = 64 - log2_size;
  for (std::uint32_t slot : fresh) {
    if (slot != kNoOwner) put(slot);
  }
}

void OwnerTable::make_room() {
  if (free_ == kNoOwner && slots_.size() == slots_.capacity()) slots_.reserve(slots_.size() * 2);
  if ((active_ + 1) * 2 > index_.size()) rehash(64 - shift_ + 1);
}

std::uint32_t OwnerTable::add(OwnerId id, std::uint64_t first_serial) noexcept {
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

void OwnerTable::remove(std::uint32_t slot) noexcept {
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
