#include "kvpool/kernels/paged_attention.h"

#include <algorithm>
#include <vector>

#if KVPOOL_HAVE_HIGHWAY
#include "paged_decode.h"
#include "paged_prefill_simd.h"
#endif

namespace kvpool::kernels {
namespace {

std::size_t scalar_scratch_bytes(const PagedAttentionParams& p, std::int64_t) {
  const std::int64_t key_dim = p.keys.shape.head_dim;
  const std::int64_t value_dim = p.values.shape.head_dim;
  return static_cast<std::size_t>(key_dim + std::max(key_dim, value_dim) + value_dim) *
         sizeof(float);
}

#if KVPOOL_HAVE_HIGHWAY
/// Each decode kernel with the prefill kernel of its target, or the best one for a target of
/// decode's own; then the targets that have no decode kernel.
std::vector<PagedAttentionKernel> simd_kernels() {
  const std::vector<PagedAttentionKernel> prefill = paged_prefill_simd_kernels();
  std::vector<PagedAttentionKernel> kernels = paged_decode_simd_kernels();
  for (PagedAttentionKernel& kernel : kernels) {
    const auto same = std::ranges::find(prefill, kernel.target, &PagedAttentionKernel::target);
    kernel.prefill = (same == prefill.end() ? prefill.front() : *same).prefill;
  }
  for (const PagedAttentionKernel& kernel : prefill) {
    if (std::ranges::find(kernels, kernel.target, &PagedAttentionKernel::target) == kernels.end()) {
      kernels.push_back(kernel);
    }
  }
  return kernels;
}
#endif

}  // namespace

std::span<const PagedAttentionKernel> paged_attention_kernels() {
  static const std::vector<PagedAttentionKernel> kernels = [] {
    std::vector<PagedAttentionKernel> list;
#if KVPOOL_HAVE_HIGHWAY
    list = simd_kernels();
#endif
    const PagedAttentionKernel::Variant scalar = {
        scalar_scratch_bytes, [](const PagedAttentionParams& params, std::byte* scratch,
                                 WorkerPool*) { paged_attention_scalar(params, scratch); }};
    list.push_back({"scalar", scalar, scalar});
    return list;
  }();
  return kernels;
}

std::size_t paged_attention_scratch_bytes(const PagedAttentionParams& params,
                                          std::int64_t n_workers) noexcept {
  return paged_attention_kernels().front().scratch_bytes(params, n_workers);
}

void paged_attention(const PagedAttentionParams& params, std::byte* scratch,
                     WorkerPool* workers) noexcept {
  paged_attention_kernels().front().run(params, scratch, workers);
}

}  // namespace kvpool::kernels
