#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "block_record.h"
#include "kvpool/base/error.h"

namespace kvpool::core {

/// A reference beside the one of the checkout: made by fork, or by the copy of a shared block.
struct ExtraReference {
  std::uint64_t serial = 0;  // stays when the reference is dropped
  std::uint64_t order = 0;   // position among the owner's references: the serial it stands in for
  std::uint32_t record = 0;
  Links links;  // owner kNoOwner: the slot is free, next is the next free slot
};

/// Extra references, in slots that are used again.
class ReferenceSlab {
 public:
  ExtraReference& operator[](std::uint32_t slot) noexcept { return slots_[slot]; }
  const ExtraReference& operator[](std::uint32_t slot) const noexcept { return slots_[slot]; }
  std::size_t size() const noexcept { return slots_.size(); }
  std::int64_t live() const noexcept { return live_; }

  /// Makes room for `n` more; take then cannot fail. Throws Error past kMaxReferences.
  void make_room(std::int64_t n) {
    if (n > kMaxReferences - live_) {
      throw Error("[BlockPoolAllocator] no room for " + std::to_string(n) +
                  " more shared references, " + std::to_string(live_) + " are live");
    }
    const std::size_t needed = static_cast<std::size_t>(live_ + n);
    if (needed > slots_.capacity()) slots_.reserve(std::max(needed, slots_.capacity() * 2));
  }
  std::uint32_t take() noexcept {
    ++live_;
    if (free_ == kNoReference) {
      slots_.emplace_back();
      return static_cast<std::uint32_t>(slots_.size() - 1);
    }
    const std::uint32_t slot = free_;
    free_ = slots_[slot].links.next;
    return slot;
  }
  void give_back(std::uint32_t slot) noexcept {
    --live_;
    slots_[slot].links = {kNoOwner, kNoReference, free_};
    free_ = slot;
  }

 private:
  std::vector<ExtraReference> slots_;
  std::uint32_t free_ = kNoReference;
  std::int64_t live_ = 0;
};

}  // namespace kvpool::core
