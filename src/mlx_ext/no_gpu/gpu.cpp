#include "../gpu.h"

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext::gpu {
namespace {

[[noreturn]] void no_kernels(const char* call) {
  throw Error("[" + std::string(call) + "] there are no kernels for this GPU");
}

}  // namespace

bool is_available() noexcept { return false; }
std::string description() { return "no kernels for this platform's GPU"; }

HeldMemory held_memory() noexcept { return {}; }
void reset_peak_memory() noexcept {}

std::shared_ptr<storage::SlabMemory> slab_memory() { no_kernels("gpu::slab_memory"); }
bool is_gpu_memory(const storage::SlabMemory*) noexcept { return false; }
std::shared_ptr<cuda::PageTables> make_tables() { return nullptr; }

std::string_view why_not(const VisibleBatch&, Which, Which, std::int64_t, bool) {
  return "no kernels for this GPU";
}

void require_append(mlx::core::Stream) { no_kernels("AppendPages::eval_gpu"); }

void append(mlx::core::Stream, const std::shared_ptr<const cache::AppendPlan>&,
            const mlx::core::array*, const mlx::core::array*, std::int64_t,
            const mlx::core::array&) {
  no_kernels("AppendPages::eval_gpu");
}
void gather(mlx::core::Stream, const std::shared_ptr<const VisibleBatch>&, Which,
            const std::vector<mlx::core::array>&, mlx::core::array&) {
  no_kernels("GatherPages::eval_gpu");
}
void attend(mlx::core::Stream, const std::shared_ptr<const VisibleBatch>&,
            const PagedAttention::Options&, const std::vector<mlx::core::array>&,
            mlx::core::array&) {
  no_kernels("PagedAttention::eval_gpu");
}

}  // namespace kvpool::mlx_ext::gpu
