#pragma once

#include <mlx/allocator.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>

#include "kvpool/storage/slab_memory.h"

namespace kvpool::mlx_ext::cuda {

// For what runs on a stream that is being built in this thread. Where the device has no memory
// left, idle buffers are given back, those of MLX too, and at last the stream's work is waited for;
// then Error is thrown.

std::uint64_t device_memory(std::size_t bytes, mlx::core::Stream stream);
void free_device_memory(std::uint64_t address, std::size_t bytes) noexcept;

/// Bytes that were obtained here and are not freed yet, slabs and idle buffers among them, and the
/// most there were since reset_peak_held_bytes().
std::size_t held_bytes() noexcept;
std::size_t peak_held_bytes() noexcept;
void reset_peak_held_bytes() noexcept;

/// Memory for an output of a primitive, on the device: MLX's allocator gives an extension managed
/// memory alone, which a kernel first has to fetch. Kept for later outputs on the stream when the
/// array goes.
mlx::core::allocator::Data output_memory(std::size_t bytes, mlx::core::Stream stream);

/// Device memory of one launch's own, to be dropped when the launch has run. It starts with
/// kCounterBytes of zeros, which kernels leave zero.
class Scratch {
 public:
  static constexpr std::size_t kCounterBytes = std::size_t{64} << 10;

  Scratch(std::size_t bytes, mlx::core::Stream stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::uint64_t counters() const noexcept { return address_; }
  std::uint64_t data() const noexcept { return address_ + kCounterBytes; }

 private:
  std::size_t size_;
  int stream_;
  std::uint64_t address_;
};

/// Slabs of pages in device memory. The pointers are the device's: nobody reads them here.
class DeviceSlabs : public storage::SlabMemory {
 public:
  std::byte* obtain(std::size_t size) noexcept override;
  void give_back(std::byte* data, std::size_t size) noexcept override;
};

}  // namespace kvpool::mlx_ext::cuda
