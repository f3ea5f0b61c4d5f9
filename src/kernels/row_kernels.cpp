#include "kvpool/kernels/row_kernels.h"

#include <vector>

#if KVPOOL_HAVE_HIGHWAY
#include "row_kernels_simd.h"
#endif

namespace kvpool::kernels {

std::span<const RowKernels> all_row_kernels() {
  static const std::vector<RowKernels> kernels = [] {
    std::vector<RowKernels> list;
#if KVPOOL_HAVE_HIGHWAY
    list = simd_row_kernels();
#endif
    list.push_back(scalar_row_kernels());
    return list;
  }();
  return kernels;
}

const RowKernels& row_kernels() { return all_row_kernels().front(); }

}  // namespace kvpool::kernels
