#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>

// What MLX's CUDA build exports and its headers declare only where CUDA's are. One binary serves
// both builds of MLX: the symbols are weak, so they are null beside MLX's CPU build.

struct CUfunc_st;
/// CUDA's own, as it is passed.
struct dim3 {
  unsigned int x, y, z;
};

namespace mlx::core::cu {

/// Puts kernels into the graph that a stream runs next. Kernels run in the order that the arrays
/// named before each of them give: after those that wrote its inputs, or its outputs.
class __attribute__((visibility("default"))) CommandEncoder {
 public:
  [[gnu::weak]] void set_input_array(const array& array);
  [[gnu::weak]] void set_output_array(const array& array);
  [[gnu::weak]] void add_kernel_node_raw(CUfunc_st* function, dim3 grid, dim3 block, dim3 cluster,
                                         std::uint32_t shared_bytes, void** parameters);
  /// Called in another thread once the kernels so far have run.
  [[gnu::weak]] void add_completed_handler(std::function<void()> task);
};

[[gnu::weak]] CommandEncoder& get_command_encoder(Stream stream);

}  // namespace mlx::core::cu

namespace kvpool::mlx_ext::cuda {

/// What an allocator::Buffer of MLX's CUDA build points to.
struct BufferRecord {
  void* data;
  std::size_t size;
  int device;  // -1: managed memory
};

/// Where an evaluated array lies on the device.
inline std::uint64_t address(const mlx::core::array& array) {
  const auto* record = static_cast<const BufferRecord*>(array.buffer().ptr());
  return reinterpret_cast<std::uint64_t>(record->data) + static_cast<std::uint64_t>(array.offset());
}

}  // namespace kvpool::mlx_ext::cuda
