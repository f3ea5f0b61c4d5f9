#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/cache/append_plan.h"
#include "kvpool/mlx_ext/gather_pages.h"
#include "kvpool/mlx_ext/paged_attention.h"
#include "kvpool/storage/slab_memory.h"

/// What a GPU backend provides. A backend is a folder that defines these functions: cuda/ for MLX's
/// CUDA build, no_gpu/ where no kernel exists (Metal among them: a Metal backend would be one more
/// folder).
namespace kvpool::mlx_ext::gpu {

/// Pages can lie in the memory of MLX's GPU, and kernels for them can run there.
bool is_available() noexcept;
/// "CUDA on NVIDIA H200"; or why there is none.
std::string description();

/// Bytes that this library has on the GPU, beside MLX's, and the most there were.
struct HeldMemory {
  std::size_t bytes = 0;
  std::size_t peak = 0;
};
HeldMemory held_memory() noexcept;
void reset_peak_memory() noexcept;

std::shared_ptr<storage::SlabMemory> slab_memory();
/// Whether pages of slabs from there lie on the GPU.
bool is_gpu_memory(const storage::SlabMemory* memory) noexcept;

/// The device's page tables of a layer.
std::shared_ptr<cuda::PageTables> make_tables();

/// The kernels take one query a sequence: a chunk of so many is as many sequences over the same
/// pages, which a GPU reads from its cache; a larger one is better gathered.
inline constexpr std::int64_t kMostQueries = 8;

/// Why attention over such pages is not answered; empty where it is.
std::string_view why_not(const VisibleBatch& batch, Which keys, Which values,
                         std::int64_t n_queries, bool has_mask);

/// Throws where an append to the stream would fail: where it is another thread's, or where there is
/// no kernel.
void require_append(mlx::core::Stream stream);

// For eval_gpu: each adds its kernels to the stream and keeps what they use until they have run.

/// Rows are those of one sequence of `keys` and `values`, which are nullptr for an append that has
/// none any more.
void append(mlx::core::Stream stream, const std::shared_ptr<const cache::AppendPlan>& plan,
            const mlx::core::array* keys, const mlx::core::array* values, std::int64_t sequence,
            const mlx::core::array& token);
void gather(mlx::core::Stream stream, const std::shared_ptr<const VisibleBatch>& batch, Which which,
            const std::vector<mlx::core::array>& tokens, mlx::core::array& rows);
void attend(mlx::core::Stream stream, const std::shared_ptr<const VisibleBatch>& batch,
            const PagedAttention::Options& options, const std::vector<mlx::core::array>& inputs,
            mlx::core::array& output);

}  // namespace kvpool::mlx_ext::gpu
