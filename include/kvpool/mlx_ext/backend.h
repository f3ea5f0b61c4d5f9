#pragma once

#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "kvpool/cache/paged_pool.h"
#include "kvpool/storage/page_store.h"

namespace kvpool::mlx_ext {

/// Where the pages of a pool lie, and what reads and writes them there.
enum class Backend : std::uint8_t {
  /// System memory and the kernels of this library.
  kCpu,
  /// The memory of an NVIDIA GPU and kernels there.
  kCuda,
  /// As kCpu, but attention never reads pages: they are gathered, and MLX's own attention runs, on
  /// whatever device. What a GPU without kernels gets: Metal, today.
  kGather,
};

/// "cpu", "cuda", "gather".
std::string_view name_of(Backend backend) noexcept;
std::optional<Backend> backend_from_name(std::string_view name) noexcept;

/// The one that fits MLX's default device.
Backend default_backend();
/// For people: the backend's device, or why there is no GPU's.
std::string describe(Backend backend);

/// Options of a store whose pages lie where `backend` wants them. Throws InvalidArgument where this
/// machine or MLX has no such backend.
storage::PageStoreOptions store_options(Backend backend);
/// Of the pool's pages.
Backend backend_of(const cache::PagedPool& pool) noexcept;

/// Bytes that pages, tables and buffers of this library take on the GPU, beside MLX's memory, and
/// the most they took since the process began or the last reset_peak_gpu_memory().
std::pair<std::size_t, std::size_t> gpu_memory() noexcept;
void reset_peak_gpu_memory() noexcept;

/// The stream of what reads and writes a pool's pages: MLX orders it with the work on other
/// devices.
mlx::core::Stream page_stream(const cache::PagedPool& pool);

}  // namespace kvpool::mlx_ext
