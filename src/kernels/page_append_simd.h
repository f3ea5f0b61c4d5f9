#pragma once

#include <vector>

#include "kvpool/kernels/page_append.h"

namespace kvpool::kernels {

/// The vector kernels that this machine can run, fastest first.
std::vector<PageKernels> simd_page_kernels();

}  // namespace kvpool::kernels
