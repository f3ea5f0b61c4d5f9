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

void OwnerTable::rehash(int log2_size) {
  std::vector<std::uint32_t> fresh(std::size_t{1} << log2_size, kNoOwner);
  index_.swap(fresh);
  shift_ = 64 - log2_size;
  for (std::uint32_t slot : fresh) {
    if (slot != kNoOwner) put(slot);
  }
}

void OwnerTable::grow() {
  if (free_ == kNoOwner && slots_.size() == slots_.capacity()) slots_.reserve(slots_.size() * 2);
  if (is_half_full()) rehash(64 - shift_ + 1);
}

}  // namespace kvpool::core
