#pragma once

#include <memory>
#include <optional>

#include "kvpool/methods/codebook.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/method.h"
#include "kvpool/methods/sign_sketch.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// TurboQuant for inner products (Zandieh, Daliri, Hadian, Mirrokni, arXiv:2504.19874):
/// TurboQuantMse with bits - 1 bits, then a sign sketch of what it left over, which makes scores
/// unbiased. With one bit the sketch is all there is. 4 + head_dim * (bits - 1) / 8 + m / 8 bytes a
/// token.
class TurboQuantProd final : public StreamCodec {
 public:
  /// 1 <= bits <= 8; rotation and sketch map head_dim numbers.
  TurboQuantProd(std::shared_ptr<const LinearMap> rotation, int bits, SignSketch sketch);

  std::int64_t code_dims() const noexcept override { return sketch_at() + sketch_.n_signs(); }
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
  /// Where the sketch's part of code space starts.
  std::int64_t sketch_at() const noexcept { return kernels::padded_row(head_dim()); }
  std::int64_t code_bytes() const noexcept;

  std::shared_ptr<const LinearMap> rotation_;
  Codebook codebook_;
  SignSketch sketch_;
};

/// The method "turboquant_prod".
Method make_turboquant_prod(const KVCacheConfig& config);

}  // namespace kvpool::methods
