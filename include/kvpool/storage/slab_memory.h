#pragma once

#include <cstddef>
#include <memory>

namespace kvpool::storage {

/// Where slabs come from. Implementations are thread-safe; no lock of the store is held in a call.
class SlabMemory {
 public:
  virtual ~SlabMemory() = default;

  /// `size` bytes (> 0) that start at a multiple of 64, or nullptr where there are none.
  virtual std::byte* obtain(std::size_t size) noexcept = 0;
  virtual void give_back(std::byte* data, std::size_t size) noexcept = 0;
};

/// The system's memory: pages come as they are first touched and go back for good. Slabs of 2 MiB
/// and more start at a multiple of that and, with `huge_pages`, ask for huge pages.
std::shared_ptr<SlabMemory> system_slab_memory(bool huge_pages = true);

}  // namespace kvpool::storage
