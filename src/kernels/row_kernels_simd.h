#pragma once

#include <vector>

#include "kvpool/kernels/row_kernels.h"

namespace kvpool::kernels {

/// The vector kernels that this machine can run, fastest first.
std::vector<RowKernels> simd_row_kernels();

}  // namespace kvpool::kernels
