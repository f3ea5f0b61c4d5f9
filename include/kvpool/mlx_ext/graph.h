#pragma once

#include <mlx/stream.h>

#include <cstdint>
#include <string_view>

namespace kvpool::mlx_ext {

/// Throws InvalidArgument inside mx.compile, mx.grad and their like: an append writes once, when it
/// is evaluated, and a traced function would run it never or again.
void refuse_tracing(std::string_view call);

/// A number that no other thread of the process has or had: ids of threads are used again.
std::uint64_t thread_number() noexcept;

/// The stream of what reads and writes pages: their kernels run on the CPU, wherever the rest of a
/// model runs. MLX orders it with the work on other devices.
mlx::core::Stream page_stream();

/// Whether work that is built now runs where the kernels are.
bool default_device_has_kernels();

}  // namespace kvpool::mlx_ext
