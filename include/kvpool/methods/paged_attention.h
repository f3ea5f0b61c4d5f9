#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvpool/formats/format.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/row_kernels.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// The format that a PageRef names where a codec encoded the page: no page of numbers has it.
inline constexpr formats::Format kCodecPage = formats::Format::kInt1;

/// How the pages of a stream that name kCodecPage are to be read: a full block of each head, that
/// of head h from h * head_bytes, in a page of capacity block_size.
struct PageCodecs {
  /// [n_heads] codecs of equal code_dims; empty where the stream has no such page.
  std::span<const std::shared_ptr<const StreamCodec>> heads;
  std::int64_t head_bytes = 0;
};

/// Bytes of scratch, aligned to 64, that paged_attention() wants with this many workers.
std::size_t paged_attention_scratch_bytes(const kernels::PagedAttentionParams& params,
                                          const PageCodecs& keys, const PageCodecs& values,
                                          std::int64_t n_workers) noexcept;

/// kernels::paged_attention() where pages of numbers and pages of codecs mix in a sequence, keys
/// and values each for themselves. Queries are brought into code space once, pages are decoded
/// there a tile of tokens at a time for all queries of a head, and sums leave code space once.
///
/// Tokens are cut into splits of a fixed length where queries are few, and rows of queries into
/// fixed tiles where they are many; splits are combined in order: the output has the same bits for
/// any number of workers, and for a sequence alone and in a batch. Nothing is allocated. `workers`
/// may be null. Checks nothing: see kernels::validate().
void paged_attention(const kernels::PagedAttentionParams& params, const PageCodecs& keys,
                     const PageCodecs& values, std::byte* scratch, kernels::WorkerPool* workers,
                     const kernels::RowKernels& kernels = kernels::row_kernels()) noexcept;

}  // namespace kvpool::methods
