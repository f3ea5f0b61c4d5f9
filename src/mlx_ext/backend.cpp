#include "kvpool/mlx_ext/backend.h"

#include <mlx/device.h>

#include <array>
#include <memory>
#include <utility>

#include "gpu.h"
#include "kvpool/base/error.h"

namespace kvpool::mlx_ext {
namespace {

constexpr std::array<std::pair<Backend, std::string_view>, 3> kNames = {
    {{Backend::kCpu, "cpu"}, {Backend::kCuda, "cuda"}, {Backend::kGather, "gather"}}};

/// The system's memory, of pages that attention is not to read.
class GatheredSlabs : public storage::SlabMemory {
 public:
  std::byte* obtain(std::size_t size) noexcept override { return system_->obtain(size); }
  void give_back(std::byte* data, std::size_t size) noexcept override {
    system_->give_back(data, size);
  }

 private:
  std::shared_ptr<storage::SlabMemory> system_ = storage::system_slab_memory();
};

}  // namespace

std::string_view name_of(Backend backend) noexcept {
  return kNames[static_cast<std::size_t>(backend)].second;
}

std::optional<Backend> backend_from_name(std::string_view name) noexcept {
  for (const auto& [backend, its_name] : kNames) {
    if (its_name == name) return backend;
  }
  return std::nullopt;
}

Backend default_backend() {
  const mlx::core::Device device = mlx::core::default_device();
  if (device == mlx::core::Device::cpu) return Backend::kCpu;
  // Kernels run on the first GPU, where pages lie.
  return device.index == 0 && gpu::is_available() ? Backend::kCuda : Backend::kGather;
}

std::string describe(Backend backend) {
  switch (backend) {
    case Backend::kCpu:
      return "kernels on the CPU";
    case Backend::kCuda:
      return gpu::description();
    default:
      if (gpu::is_available()) return "gathered for MLX's own attention";
      return "gathered for MLX's own attention (" + gpu::description() + ")";
  }
}

storage::PageStoreOptions store_options(Backend backend) {
  storage::PageStoreOptions options;
  if (backend == Backend::kGather) options.memory = std::make_shared<GatheredSlabs>();
  if (backend == Backend::kCuda) {
    if (!gpu::is_available()) {
      throw InvalidArgument("[PagedPool::of] backend cuda is not to be had: " + gpu::description());
    }
    options.memory = gpu::slab_memory();
    options.slab_bytes = std::int64_t{64} << 20;
  }
  return options;
}

Backend backend_of(const cache::PagedPool& pool) noexcept {
  const storage::SlabMemory* const memory = pool.store().options().memory.get();
  if (gpu::is_gpu_memory(memory)) return Backend::kCuda;
  return dynamic_cast<const GatheredSlabs*>(memory) != nullptr ? Backend::kGather : Backend::kCpu;
}

std::pair<std::size_t, std::size_t> gpu_memory() noexcept {
  const gpu::HeldMemory memory = gpu::held_memory();
  return {memory.bytes, memory.peak};
}

void reset_peak_gpu_memory() noexcept { gpu::reset_peak_memory(); }

mlx::core::Stream page_stream(const cache::PagedPool& pool) {
  return mlx::core::default_stream(backend_of(pool) == Backend::kCuda ? mlx::core::Device::gpu
                                                                      : mlx::core::Device::cpu);
}

}  // namespace kvpool::mlx_ext
