#include "kvpool/kernels/attention.h"

#include <vector>

#if KVPOOL_HAVE_HIGHWAY
#include "attention_simd.h"
#endif

namespace kvpool::kernels {

std::span<const AttentionKernel> attention_kernels() {
  static const std::vector<AttentionKernel> kernels = [] {
    std::vector<AttentionKernel> list;
#if KVPOOL_HAVE_HIGHWAY
    list = attention_simd_kernels();
#endif
    list.push_back({"scalar", attention_scalar});
    return list;
  }();
  return kernels;
}

void attention(const AttentionParams& params) noexcept {
  static const auto run = attention_kernels().front().run;
  run(params);
}

}  // namespace kvpool::kernels
