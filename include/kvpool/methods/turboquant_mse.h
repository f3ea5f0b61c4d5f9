#pragma once

#include <memory>

#include "kvpool/methods/level_coder.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/method.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// TurboQuant for mean squared error (Zandieh, Daliri, Hadian, Mirrokni, arXiv:2504.19874): a
/// vector is rotated, so that its coordinates are nearly normal whatever it was, and each is
/// rounded to a Lloyd-Max level. 2 + head_dim * bits / 8 bytes a token.
class TurboQuantMse final : public StreamCodec {
 public:
  /// 1 <= bits <= 8; the rotation maps head_dim numbers.
  TurboQuantMse(std::shared_ptr<const LinearMap> rotation, int bits, TokenScale scale);

  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept override;
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;
  void enter(const float* vector, float* code_vector) const noexcept override;
  void leave(const float* code_vector, float* vector) const noexcept override;
  std::int64_t constant_bytes() const noexcept override { return rotation_->memory_bytes(); }

 private:
  std::shared_ptr<const LinearMap> rotation_;
  LevelCoder levels_;
};

/// The method "turboquant_mse".
Method make_turboquant_mse(const KVCacheConfig& config);

}  // namespace kvpool::methods
