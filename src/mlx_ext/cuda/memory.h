#pragma once

#include <mlx/allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/storage/slab_memory.h"

namespace kvpool::mlx_ext::cuda {

/// Memory for an output of a primitive, on the device: MLX's allocator gives an extension managed
/// memory alone, which a kernel first has to fetch. Kept for later outputs when the array goes.
mlx::core::allocator::Data output_memory(std::size_t bytes);

/// Device memory of one launch's own, to be dropped when the launch has run. It starts with
/// kCounterBytes of zeros, which kernels leave zero.
class Scratch {
 public:
  static constexpr std::size_t kCounterBytes = std::size_t{64} << 10;

  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::uint64_t counters() const noexcept { return address_; }
  std::uint64_t data() const noexcept { return address_ + kCounterBytes; }

 private:
  std::size_t size_;
  std::uint64_t address_;
};

/// Slabs of pages in device memory. The pointers are the device's: nobody reads them here.
class DeviceSlabs : public storage::SlabMemory {
 public:
  std::byte* obtain(std::size_t size) noexcept override;
  void give_back(std::byte* data, std::size_t size) noexcept override;
};

}  // namespace kvpool::mlx_ext::cuda
