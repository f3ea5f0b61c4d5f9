#include "memory.h"

#include <mlx/memory.h>

#include <bit>
#include <map>
#include <mutex>
#include <vector>

#include "driver.h"
#include "kvpool/base/error.h"
#include "mlx_cuda.h"

namespace kvpool::mlx_ext::cuda {
namespace {

/// CUDA's driver speaks of addresses, MLX and stores of pointers.
void* pointer(std::uint64_t address) noexcept {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// What MLX keeps for itself is given back before memory counts as used up.
std::uint64_t allocate_hard(std::size_t bytes) noexcept {
  const Driver& driver = Driver::get();
  if (const std::uint64_t address = driver.allocate(bytes)) return address;
  try {
    mlx::core::clear_cache();
  } catch (...) {
    return 0;
  }
  return driver.allocate(bytes);
}

/// Buffers that nobody uses, by size. Kept for the process: work on its way may end after statics.
class IdleBuffers {
 public:
  std::uint64_t take(std::size_t size, bool zeroed) {
    {
      const std::lock_guard lock(lock_);
      if (auto found = by_size_.find(size); found != by_size_.end() && !found->second.empty()) {
        const std::uint64_t address = found->second.back();
        found->second.pop_back();
        return address;
      }
    }
    const std::uint64_t address = allocate_hard(size);
    if (address == 0) {
      throw Error("[cuda::memory] the device has no " + std::to_string(size) + " bytes left");
    }
    if (zeroed) Driver::get().zero(address, Scratch::kCounterBytes);
    return address;
  }
  void put(std::size_t size, std::uint64_t address) {
    const std::lock_guard lock(lock_);
    by_size_[size].push_back(address);
  }

 private:
  std::mutex lock_;
  std::map<std::size_t, std::vector<std::uint64_t>> by_size_;
};

IdleBuffers& idle_outputs() {
  static IdleBuffers* const buffers = new IdleBuffers;
  return *buffers;
}

IdleBuffers& idle_scratch() {
  static IdleBuffers* const buffers = new IdleBuffers;
  return *buffers;
}

/// Few sizes, so that buffers are found again.
std::size_t rounded(std::size_t bytes) noexcept {
  constexpr std::size_t kSmall = std::size_t{1} << 20;
  if (bytes <= kSmall) return std::bit_ceil(bytes < 512 ? std::size_t{512} : bytes);
  return (bytes + kSmall - 1) / kSmall * kSmall;
}

/// Larger ones are too much to keep.
constexpr std::size_t kLargestKept = std::size_t{32} << 20;

void drop_output(mlx::core::allocator::Buffer buffer) {
  auto* const record = static_cast<BufferRecord*>(buffer.ptr());
  const auto address = reinterpret_cast<std::uint64_t>(record->data);
  // An array that was read on the host has moved to managed memory, and MLX freed what it left.
  if (record->device >= 0 && record->size <= kLargestKept) {
    idle_outputs().put(record->size, address);
  } else {
    Driver::get().free(address);
  }
  delete record;
}

}  // namespace

mlx::core::allocator::Data output_memory(std::size_t bytes) {
  auto record = std::make_unique<BufferRecord>();
  record->size = rounded(bytes);
  record->device = 0;
  record->data = pointer(idle_outputs().take(record->size, false));
  return {mlx::core::allocator::Buffer(record.release()), drop_output};
}

Scratch::Scratch(std::size_t bytes)
    : size_(rounded(bytes + kCounterBytes)), address_(idle_scratch().take(size_, true)) {}

Scratch::~Scratch() { idle_scratch().put(size_, address_); }

std::byte* DeviceSlabs::obtain(std::size_t size) noexcept {
  return static_cast<std::byte*>(pointer(allocate_hard(size)));
}

void DeviceSlabs::give_back(std::byte* data, std::size_t) noexcept {
  Driver::get().free(reinterpret_cast<std::uint64_t>(data));
}

}  // namespace kvpool::mlx_ext::cuda
