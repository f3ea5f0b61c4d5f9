#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvpool/mlx_ext/paged_attention.h"

namespace kvpool::mlx_ext::cuda {

/// Why the kernel does not answer; empty where it does.
std::string_view why_not(const VisibleBatch& batch, Which keys, Which values,
                         std::int64_t n_queries, bool has_mask);

/// Adds the kernels that attend to the stream. Inputs as those of PagedAttention; `output` has its
/// memory.
void add_attention(const VisibleBatch& batch, const PagedAttention::Options& options,
                   const std::vector<mlx::core::array>& inputs, const mlx::core::array& output,
                   mlx::core::Stream stream);

}  // namespace kvpool::mlx_ext::cuda
