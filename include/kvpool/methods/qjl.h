#pragma once

#include "kvpool/methods/method.h"
#include "kvpool/methods/sign_sketch.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// QJL (Zandieh, Daliri, Han, arXiv:2406.03482): a vector is m signs of random projections and its
/// norm. 2 + m / 8 bytes a token.
class Qjl final : public StreamCodec {
 public:
  /// The sketch maps head_dim numbers.
  explicit Qjl(SignSketch sketch) noexcept;

  std::int64_t code_dims() const noexcept override { return sketch_.n_signs(); }
  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept override;
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;
  void enter(const float* vector, float* code_vector) const noexcept override;
  void leave(const float* code_vector, float* vector) const noexcept override;
  std::int64_t constant_bytes() const noexcept override;

 private:
  SignSketch sketch_;
};

/// The method "qjl".
Method make_qjl(const KVCacheConfig& config);

}  // namespace kvpool::methods
