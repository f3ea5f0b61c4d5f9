#pragma once

#include <array>
#include <memory>
#include <vector>

#include "kvpool/methods/angle_codebook.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/method.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// PolarQuant (Han, Kacham, Karbasi, Mirrokni, Zandieh, arXiv:2502.02617): a rotated vector becomes
/// a tree of polar coordinates. Level 1 turns each pair of coordinates into an angle and a radius,
/// the next levels do so with pairs of radii; what is stored is a code an angle and head_dim / 16
/// radii.
///
/// The pairs of a level are (i, i + half), which a random rotation makes as good as neighbours and
/// which keeps every level contiguous.
class Polar final : public StreamCodec {
 public:
  static constexpr int kLevels = 4;
  /// Bits of the angles of level 1, 2, 3, 4: 1..8 for the first, 0..8 for the others.
  using LevelBits = std::array<int, kLevels>;

  enum class Radii : std::uint8_t {
    /// 16 bits each, as published.
    kWide,
    /// 8 bits each and one scale a token.
    kNarrow,
    /// kNarrow with a scale that makes <decoded, vector> = |vector|^2: scores do not shrink.
    kNarrowUnbiased,
  };

  /// Level-1 angles range over the whole circle and count most: one bit more for them, and one less
  /// for the last two levels, halves the error in the same space.
  static LevelBits best_level_bits(int bits) noexcept;

  /// head_dim, the size of the rotation, is a multiple of 16.
  Polar(std::shared_ptr<const LinearMap> rotation, LevelBits level_bits, Radii radii);

  std::int64_t code_dims() const noexcept override;
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
  std::int64_t n_radii() const noexcept { return head_dim() >> kLevels; }
  /// Angles of level 0..kLevels - 1 (the paper's 1..4).
  std::int64_t n_angles(int level) const noexcept { return head_dim() >> (level + 1); }
  std::int64_t level_bytes(int level) const noexcept;
  std::int64_t radii_bytes() const noexcept;
  /// Floats of a row of radii of any level, with what the kernels write past its end.
  std::int64_t radii_stride() const noexcept;
  /// Fills `angles` and turns `coordinates` into the radii of the last level, in place.
  void measure(float* coordinates, std::uint8_t* angles) const noexcept;
  /// <decoded, coordinates>, for decoded radii `radii`.
  double overlap(const float* coordinates, const float* radii,
                 const std::uint8_t* angles) const noexcept;

  std::shared_ptr<const LinearMap> rotation_;
  std::vector<AngleCodebook> codebooks_;
  Radii radii_;
};

/// The method "polar".
Method make_polar(const KVCacheConfig& config);

}  // namespace kvpool::methods
