#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvpool/storage/page_slot.h"
#include "kvpool/storage/slab_memory.h"

namespace kvpool::storage {

struct PageStoreOptions {
  /// Bytes that slots may take, counted by their size classes; none: no limit.
  std::optional<std::int64_t> byte_budget;
  /// Size of a full-grown slab, >= 1. A class starts with small slabs and doubles them up to this,
  /// so that a small pool takes little; a slab always has room for one page.
  std::int64_t slab_bytes = std::int64_t{4} << 20;
  /// system_slab_memory() where null.
  std::shared_ptr<SlabMemory> memory;

  /// Throws InvalidArgument naming the first field out of range and its value.
  void validate() const;
};

/// Why slots could not be had: the expected failure, as a value.
struct ByteShortage {
  /// Bytes that the request takes, in size classes.
  std::int64_t needed = 0;
  /// Bytes of the budget that were left.
  std::int64_t available = 0;
  std::int64_t budget = 0;
  /// The budget had room and the system had no memory.
  bool system = false;

  /// `5,120 bytes are needed, 1,024 of the byte budget of 8,192 are left`, without the commas.
  std::string message() const;
};

struct PageStoreStats {
  /// Bytes of slots in use, by size class; what the budget limits.
  std::int64_t used_bytes = 0;
  std::int64_t n_used = 0;
  /// Bytes of all slabs, used or not.
  std::int64_t committed_bytes = 0;
  std::int64_t n_slabs = 0;
  std::int64_t peak_used_bytes = 0;

  friend bool operator==(const PageStoreStats&, const PageStoreStats&) = default;
};

/// The memory of pages: slots of a few size classes in slabs that are taken when they are needed
/// and given back to the system when their last slot goes.
///
/// A slot is in use as long as a SlotRef names it. Free slots are poisoned under AddressSanitizer.
/// Thread-safe; the store outlives its slots.
class PageStore {
 public:
  /// Class sizes are multiples of this, and slots start at one.
  static constexpr std::int64_t kGranule = 64;
  static constexpr std::int64_t class_size(std::int64_t bytes) noexcept {
    return (bytes + kGranule - 1) / kGranule * kGranule;
  }

  /// Throws InvalidArgument where `options` are out of range.
  explicit PageStore(PageStoreOptions options = {});
  ~PageStore();
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  const PageStoreOptions& options() const noexcept;

  /// Fills `out`, whose slots are empty, with slots of at least `bytes` (>= 1) each; all or none.
  /// Their contents are undefined. Throws InvalidArgument, and std::bad_alloc for the books alone.
  [[nodiscard]] std::optional<ByteShortage> try_take(std::int64_t bytes, std::span<SlotRef> out);

  /// Bytes that the budget still has room for; the largest number without a budget.
  std::int64_t available_bytes() const;
  PageStoreStats stats() const;

  /// Throws Error naming the first book that does not add up. For tests: O(slots).
  void check_invariants() const;

 private:
  friend class SlotRef;
  friend struct PageSlab;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvpool::storage
