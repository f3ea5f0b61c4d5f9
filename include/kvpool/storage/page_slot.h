#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvpool::storage {

class PageStore;
struct PageSlab;

/// The memory of one page. Made and kept by a PageStore.
struct PageSlot {
  std::atomic<std::uint32_t> references{0};
  /// Token slots below this one may be seen by somebody; see SlotRef::seen.
  std::atomic<std::uint32_t> seen{0};
  std::byte* data = nullptr;
  PageSlab* slab = nullptr;
  PageSlot* next_free = nullptr;
};

/// A counted reference to a slot, from any thread. Whoever reads or writes the bytes holds one: the
/// slot goes back to its store, which must still be there, with the last.
class SlotRef {
 public:
  SlotRef() noexcept = default;
  SlotRef(const SlotRef& other) noexcept : slot_(other.slot_) {
    if (slot_ != nullptr) slot_->references.fetch_add(1, std::memory_order_relaxed);
  }
  SlotRef(SlotRef&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
  SlotRef& operator=(SlotRef other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~SlotRef() { reset(); }

  explicit operator bool() const noexcept { return slot_ != nullptr; }
  std::byte* data() const noexcept { return slot_->data; }
  /// Of the size class, which is what counts against the budget.
  std::size_t size() const noexcept;
  /// Nobody else holds the slot, and what others did with it is seen here.
  bool is_alone() const noexcept { return slot_->references.load(std::memory_order_acquire) == 1; }

  /// Token slots that somebody may see: written and not known to be out of everyone's sight. A
  /// writer at or past it disturbs no reader.
  std::int64_t seen() const noexcept { return slot_->seen.load(std::memory_order_relaxed); }
  void set_seen(std::int64_t n_tokens) const noexcept {
    slot_->seen.store(static_cast<std::uint32_t>(n_tokens), std::memory_order_relaxed);
  }

  void reset() noexcept {
    if (slot_ == nullptr) return;
    if (slot_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) give_back(slot_);
    slot_ = nullptr;
  }

  friend bool operator==(const SlotRef&, const SlotRef&) noexcept = default;

 private:
  friend class PageStore;

  explicit SlotRef(PageSlot* slot) noexcept : slot_(slot) {}
  static void give_back(PageSlot* slot) noexcept;

  PageSlot* slot_ = nullptr;
};

}  // namespace kvpool::storage
