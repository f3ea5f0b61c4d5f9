#pragma once

#include <memory>
#include <optional>

#include "kvpool/methods/level_coder.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/method.h"
#include "kvpool/methods/sign_sketch.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// SpectralQuant ("3% Is All You Need: Breaking TurboQuant's Compression Limit via Spectral
/// Structure", Gopinath 2026): in the eigenbasis of calibration data a few signal coordinates carry
/// most of a vector. They and the rest are rounded apart, each relative to its own size, and keys
/// may add a sign sketch of the signal's error. Without calibration the basis is random. With it
/// the signal has two bits more a coordinate, unless as published: at equal widths the error would
/// lie where queries look, and the random basis, which spreads it, be better.
class Spectral final : public StreamCodec {
 public:
  struct Parts {
    /// Rows are the basis, most variance first.
    std::shared_ptr<const LinearMap> basis;
    /// Coordinates of the signal, 1..head_dim - 1.
    std::int64_t signal_dims = 1;
    LevelCoder signal;
    LevelCoder noise;
    /// Of signal_dims numbers.
    std::optional<SignSketch> sketch;
  };

  explicit Spectral(Parts parts);

  std::int64_t code_dims() const noexcept override;
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
  std::int64_t noise_dims() const noexcept { return head_dim() - parts_.signal_dims; }
  std::int64_t signal_bytes() const noexcept;
  std::int64_t noise_bytes() const noexcept;
  std::int64_t sketch_bytes() const noexcept {
    return parts_.sketch ? parts_.sketch->row_bytes() : 0;
  }
  std::int64_t n_scales() const noexcept { return parts_.sketch ? 3 : 2; }
  // Where the parts of code space start: signal, noise, sketch.
  std::int64_t noise_at() const noexcept { return kernels::padded_row(parts_.signal_dims); }
  std::int64_t sketch_at() const noexcept { return noise_at() + kernels::padded_row(noise_dims()); }

  Parts parts_;
};

/// The method "spectral".
Method make_spectral(const KVCacheConfig& config);

}  // namespace kvpool::methods
