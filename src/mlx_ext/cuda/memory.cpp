#include "memory.h"

#include <mlx/memory.h>

#include <atomic>
#include <bit>
#include <memory>
#include <string>

#include "driver.h"
#include "kvpool/base/error.h"
#include "kvpool/storage/idle_regions.h"
#include "mlx_cuda.h"

namespace kvpool::mlx_ext::cuda {
namespace {

/// CUDA's driver speaks of addresses, MLX and stores of pointers.
void* pointer(std::uint64_t address) noexcept {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

std::atomic<std::size_t> held{0};
std::atomic<std::size_t> peak_held{0};

std::uint64_t allocate(std::size_t bytes) noexcept {
  const std::uint64_t address = Driver::get().allocate(bytes);
  if (address == 0) return 0;
  const std::size_t now = held += bytes;
  for (std::size_t peak = peak_held; peak < now;) {
    if (peak_held.compare_exchange_weak(peak, now)) break;
  }
  return address;
}

/// More is not worth keeping: a prompt's gathered keys and values come in a new size with each
/// part.
constexpr std::size_t kMostIdle = std::size_t{1} << 30;

// Never destroyed: work on its way may end after statics.

storage::IdleRegions& idle_outputs() {
  static auto* const memory = new storage::IdleRegions(kMostIdle, free_device_memory);
  return *memory;
}

storage::IdleRegions& idle_scratch() {
  static auto* const memory = new storage::IdleRegions(kMostIdle, free_device_memory);
  return *memory;
}

/// 0 where there is none, after what nobody uses was given back.
std::uint64_t allocate_hard(std::size_t bytes) noexcept {
  if (const std::uint64_t address = allocate(bytes)) return address;
  idle_outputs().shrink(0);
  idle_scratch().shrink(0);
  if (const std::uint64_t address = allocate(bytes)) return address;
  try {
    mlx::core::clear_cache();
  } catch (...) {
    return 0;
  }
  return allocate(bytes);
}

/// Few sizes, so that buffers are found again.
std::size_t rounded(std::size_t bytes) noexcept {
  constexpr std::size_t kSmall = std::size_t{1} << 20;
  if (bytes <= kSmall) return std::bit_ceil(bytes < 512 ? std::size_t{512} : bytes);
  return (bytes + kSmall - 1) / kSmall * kSmall;
}

/// Larger ones are too much to keep.
constexpr std::size_t kLargestKept = std::size_t{32} << 20;

void drop_output(mlx::core::allocator::Buffer buffer, int stream) noexcept {
  const std::unique_ptr<BufferRecord> record(static_cast<BufferRecord*>(buffer.ptr()));
  const auto address = reinterpret_cast<std::uint64_t>(record->data);
  // Another thread may have held the lock when the process forked.
  if (Driver::get().in_child()) return;
  // An array that was read on the host has moved to managed memory, and MLX freed what it left.
  if (record->device >= 0 && record->size <= kLargestKept) {
    idle_outputs().put(record->size, stream, address);
  } else {
    free_device_memory(address, record->size);
  }
}

}  // namespace

void free_device_memory(std::uint64_t address, std::size_t bytes) noexcept {
  Driver::get().free(address);
  held -= bytes;
}

std::size_t held_bytes() noexcept { return held; }
std::size_t peak_held_bytes() noexcept { return peak_held; }
void reset_peak_held_bytes() noexcept { peak_held = held.load(); }

std::uint64_t device_memory(std::size_t bytes, mlx::core::Stream stream) {
  if (const std::uint64_t address = allocate_hard(bytes)) return address;
  mlx::core::synchronize(stream);
  if (const std::uint64_t address = allocate_hard(bytes)) return address;
  throw Error("[cuda::device_memory] the device has no " + std::to_string(bytes) + " bytes left");
}

mlx::core::allocator::Data output_memory(std::size_t bytes, mlx::core::Stream stream) {
  auto record = std::make_unique<BufferRecord>();
  record->size = rounded(bytes);
  record->device = 0;
  std::uint64_t address = idle_outputs().take(record->size, stream.index);
  if (address == 0) address = device_memory(record->size, stream);
  record->data = pointer(address);
  return {
      mlx::core::allocator::Buffer(record.release()),
      [index = stream.index](mlx::core::allocator::Buffer buffer) { drop_output(buffer, index); }};
}

Scratch::Scratch(std::size_t bytes, mlx::core::Stream stream)
    : size_(rounded(bytes + kCounterBytes)),
      stream_(stream.index),
      address_(idle_scratch().take(size_, stream_)) {
  if (address_ != 0) return;
  address_ = device_memory(size_, stream);
  try {
    Driver::get().zero(address_, kCounterBytes);
  } catch (...) {
    free_device_memory(address_, size_);
    throw;
  }
}

Scratch::~Scratch() {
  if (!Driver::get().in_child()) idle_scratch().put(size_, stream_, address_);
}

std::byte* DeviceSlabs::obtain(std::size_t size) noexcept {
  return static_cast<std::byte*>(pointer(allocate_hard(size)));
}

void DeviceSlabs::give_back(std::byte* data, std::size_t size) noexcept {
  free_device_memory(reinterpret_cast<std::uint64_t>(data), size);
}

}  // namespace kvpool::mlx_ext::cuda
