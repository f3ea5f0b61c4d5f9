#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/cache/stream_layout.h"
#include "kvpool/kernels/paged_attention.h"

namespace kvpool::cache {

/// Bytes of scratch, aligned to 64, that attend_pages() wants with this many workers.
std::size_t attend_pages_scratch_bytes(const kernels::PagedAttentionParams& params,
                                       const StreamLayout& keys, const StreamLayout& values,
                                       std::int64_t n_workers) noexcept;

/// kernels::paged_attention() over pages of layers with these layouts, whatever is in the pages: of
/// numbers alone, or of a method's codes too. The sequences of a batch have equal layouts.
void attend_pages(const kernels::PagedAttentionParams& params, const StreamLayout& keys,
                  const StreamLayout& values, std::byte* scratch,
                  kernels::WorkerPool* workers) noexcept;

}  // namespace kvpool::cache
