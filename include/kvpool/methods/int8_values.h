#pragma once

#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// Eight bits a number and a scale a token: s = max |v| / 127, code = round(v / s), half to even.
/// The value coder of the published TurboQuant, PolarQuant and QJL caches.
class Int8Values final : public StreamCodec {
 public:
  explicit Int8Values(std::int64_t head_dim) noexcept : StreamCodec(head_dim) {}

  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept override { return n_tokens; }
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;
};

}  // namespace kvpool::methods
