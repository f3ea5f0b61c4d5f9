#pragma once

#include <vector>

#include "kvpool/kernels/paged_attention.h"

namespace kvpool::kernels {

/// The kernels for many queries that this machine can run, fastest first. They take any number of
/// queries; with few of them most of their work is wasted.
std::vector<PagedAttentionKernel> paged_prefill_simd_kernels();

}  // namespace kvpool::kernels
