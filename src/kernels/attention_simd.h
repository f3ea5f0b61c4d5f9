#pragma once

#include <vector>

#include "kvpool/kernels/attention.h"

namespace kvpool::kernels {

/// The vector kernels that this machine can run, fastest first.
std::vector<AttentionKernel> attention_simd_kernels();

}  // namespace kvpool::kernels
