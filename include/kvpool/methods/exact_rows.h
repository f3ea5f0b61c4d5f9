#pragma once

#include "kvpool/formats/format.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// Numbers as they are, in fp16, bf16 or fp32: the recent tokens that a cache does not quantise.
class ExactRows final : public StreamCodec {
 public:
  /// `format` is a float format.
  ExactRows(std::int64_t head_dim, formats::Format format) noexcept
      : StreamCodec(head_dim), format_(format) {}

  formats::Format format() const noexcept { return format_; }

  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t) const noexcept override { return 0; }
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;

 private:
  formats::Format format_;
};

}  // namespace kvpool::methods
