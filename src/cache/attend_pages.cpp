#include "kvpool/cache/attend_pages.h"

#include "kvpool/methods/paged_attention.h"

namespace kvpool::cache {

std::size_t attend_pages_scratch_bytes(const kernels::PagedAttentionParams& params,
                                       const StreamLayout& keys, const StreamLayout& values,
                                       std::int64_t n_workers) noexcept {
  if (!keys.has_codec() && !values.has_codec()) {
    return kernels::paged_attention_scratch_bytes(params, n_workers);
  }
  return methods::paged_attention_scratch_bytes(params, keys.codecs(), values.codecs(), n_workers);
}

void attend_pages(const kernels::PagedAttentionParams& params, const StreamLayout& keys,
                  const StreamLayout& values, std::byte* scratch,
                  kernels::WorkerPool* workers) noexcept {
  if (!keys.has_codec() && !values.has_codec()) {
    return kernels::paged_attention(params, scratch, workers);
  }
  methods::paged_attention(params, keys.codecs(), values.codecs(), scratch, workers);
}

}  // namespace kvpool::cache
