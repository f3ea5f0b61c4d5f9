#include "kvpool/methods/polar.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "kvpool/methods/magnitude.h"
#include "kvpool/methods/packed_codes.h"
#include "kvpool/methods/page_layout.h"
#include "kvpool/methods/row_math.h"
#include "kvpool/methods/value_codec.h"

namespace kvpool::methods {

// Page: radii, wide [capacity, n_radii] or a scale [capacity] and narrow [capacity, n_radii] bytes;
// then for each level its codes [capacity, level_bytes].

namespace {
constexpr float kLargestRadius = 255;
}

Polar::LevelBits Polar::best_level_bits(int bits) noexcept {
  const auto within = [](int wanted) { return std::clamp(wanted, 0, 8); };
  return {within(bits + 1), bits, within(bits - 1), within(bits - 1)};
}

Polar::Polar(std::shared_ptr<const LinearMap> rotation, LevelBits level_bits, Radii radii)
    : StreamCodec(rotation->rows()), rotation_(std::move(rotation)), radii_(radii) {
  codebooks_.push_back(AngleCodebook::whole_circle(level_bits[0]));
  for (int level = 1; level < kLevels; ++level) {
    // Both radii of a level are norms of 2^level normal numbers.
    codebooks_.push_back(AngleCodebook::first_quadrant(
        (1 << level) - 1, level_bits[static_cast<std::size_t>(level)]));
  }
}

std::int64_t Polar::code_dims() const noexcept {
  return kernels::padded_row(n_angles(0)) + n_angles(0);
}

std::int64_t Polar::level_bytes(int level) const noexcept {
  return packed_bytes(n_angles(level), codebooks_[static_cast<std::size_t>(level)].bits());
}

std::int64_t Polar::radii_bytes() const noexcept {
  return radii_ == Radii::kWide ? 2 * n_radii() : 2 + n_radii();
}

std::int64_t Polar::page_bytes(std::int64_t capacity) const noexcept {
  std::int64_t bytes = radii_bytes();
  for (int level = 0; level < kLevels; ++level) bytes += level_bytes(level);
  return capacity * bytes;
}

std::int64_t Polar::radii_stride() const noexcept {
  return kernels::padded_row(n_angles(1)) + kernels::padded_row(n_angles(1));
}

std::int64_t Polar::scratch_floats(std::int64_t n_tokens) const noexcept {
  return std::max(3 * head_dim(), n_tokens * 2 * radii_stride());
}

void Polar::measure(float* coordinates, std::uint8_t* angles) const noexcept {
  for (int level = 0; level < kLevels; ++level) {
    const AngleCodebook& codebook = codebooks_[static_cast<std::size_t>(level)];
    const std::int64_t n = n_angles(level);
    for (std::int64_t i = 0; i < n; ++i) {
      const float x = coordinates[i];
      const float y = coordinates[i + n];
      angles[i] = codebook.code(x, y);
      coordinates[i] = std::sqrt(x * x + y * y);
    }
    angles += n;
  }
}

double Polar::overlap(const float* coordinates, const float* radii,
                      const std::uint8_t* angles) const noexcept {
  // Each level folds the coordinates along its decoded angles; what is left lies along the radii.
  float folded[kMaxDims];
  std::copy_n(coordinates, head_dim(), folded);
  for (int level = 0; level < kLevels; ++level) {
    const AngleCodebook& codebook = codebooks_[static_cast<std::size_t>(level)];
    const std::int64_t n = n_angles(level);
    for (std::int64_t i = 0; i < n; ++i) {
      folded[i] =
          folded[i] * codebook.cosines()[angles[i]] + folded[i + n] * codebook.sines()[angles[i]];
    }
    angles += n;
  }
  return dot(folded, radii, n_radii());
}

void Polar::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                   float* scratch) const noexcept {
  float* rotated = scratch;
  float* measured = rotated + head_dim();
  float* decoded = measured + head_dim();
  std::uint8_t angles[kMaxDims];
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    rotation_->apply(vectors + t * stride, rotated);
    std::copy_n(rotated, head_dim(), measured);
    measure(measured, angles);
    if (radii_ == Radii::kWide) {
      std::uint16_t* radii = halves_at(page, 0) + token * n_radii();
      for (std::int64_t i = 0; i < n_radii(); ++i) radii[i] = to_magnitude(measured[i]);
    } else {
      const float largest = *std::max_element(measured, measured + n_radii());
      const float inverse = largest > 0 ? kLargestRadius / largest : 0;
      std::byte* radii = page.data + 2 * page.capacity + token * n_radii();
      for (std::int64_t i = 0; i < n_radii(); ++i) {
        decoded[i] = std::nearbyint(measured[i] * inverse);
        radii[i] = static_cast<std::byte>(decoded[i]);
      }
      float scale = largest / kLargestRadius;
      if (radii_ == Radii::kNarrowUnbiased && largest > 0) {
        scale = static_cast<float>(squared_norm(rotated, head_dim()) /
                                   overlap(rotated, decoded, angles));
      }
      halves_at(page, 0)[token] = to_magnitude(scale);
    }
    std::int64_t offset = page.capacity * radii_bytes();
    const std::uint8_t* of_level = angles;
    for (int level = 0; level < kLevels; ++level) {
      pack_codes({of_level, static_cast<std::size_t>(n_angles(level))},
                 codebooks_[static_cast<std::size_t>(level)].bits(),
                 page.data + offset + token * level_bytes(level));
      of_level += n_angles(level);
      offset += page.capacity * level_bytes(level);
    }
  }
}

void Polar::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                   kernels::FloatRows out, float* scratch) const noexcept {
  kernels::FloatRows radii{scratch, radii_stride()};
  kernels::FloatRows next{scratch + range.count * radii_stride(), radii_stride()};
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t first = (range.first + t) * n_radii();
    float* row = radii.data + t * radii.stride;
    if (radii_ == Radii::kWide) {
      read_magnitudes(halves_at(page, 0) + first, n_radii(), row);
    } else {
      const float scale = from_magnitude(halves_at(page, 0)[range.first + t]);
      const std::byte* codes = page.data + 2 * page.capacity + first;
      for (std::int64_t i = 0; i < n_radii(); ++i) {
        row[i] = scale * static_cast<float>(std::to_integer<unsigned>(codes[i]));
      }
    }
  }
  std::int64_t offset = page_bytes(page.capacity);
  for (int level = kLevels - 1; level >= 0; --level) {
    const AngleCodebook& codebook = codebooks_[static_cast<std::size_t>(level)];
    const std::int64_t n = n_angles(level);
    const kernels::FloatRows to = level == 0 ? out : next;
    offset -= page.capacity * level_bytes(level);
    if (codebook.bits() > 0) {
      const auto rows = code_rows(page, page_bytes(page.capacity), offset, level_bytes(level),
                                  range, n, codebook.bits());
      kernels.decode_polar(rows, codebook.cosines(), codebook.sines(), {radii.data, radii.stride},
                           to);
    } else {
      for (std::int64_t t = 0; t < range.count; ++t) {
        const float* in = radii.data + t * radii.stride;
        float* row = to.data + t * to.stride;
        for (std::int64_t i = 0; i < n; ++i) {
          row[i] = in[i] * codebook.cosines()[0];
          row[n + i] = in[i] * codebook.sines()[0];
        }
      }
    }
    std::swap(radii, next);
  }
}

void Polar::enter(const float* vector, float* code_vector) const noexcept {
  rotation_->apply(vector, code_vector);
  std::fill(code_vector + head_dim(), code_vector + code_dims(), 0.0f);
}

void Polar::leave(const float* code_vector, float* vector) const noexcept {
  rotation_->apply_transposed(code_vector, vector);
}

Method make_polar(const KVCacheConfig& config) {
  const auto rotation =
      make_rotation(config.head_dim, static_cast<std::uint64_t>(config.seed),
                    config.as_published ? RotationKind::kHaar : RotationKind::kHadamard);
  const auto bits = static_cast<int>(config.bit_width_inlier);
  Polar::LevelBits level_bits = Polar::best_level_bits(bits);
  if (config.polar_level_bits) {
    for (std::size_t level = 0; level < level_bits.size(); ++level) {
      level_bits[level] = static_cast<int>((*config.polar_level_bits)[level]);
    }
  } else if (config.as_published) {
    level_bits = {bits, bits, bits, bits};
  }
  auto radii = config.scores_are_unbiased() ? Polar::Radii::kNarrowUnbiased : Polar::Radii::kNarrow;
  if (config.as_published) radii = Polar::Radii::kWide;
  return {config, std::make_unique<Polar>(rotation, level_bits, radii),
          make_value_codec(config, rotation)};
}

}  // namespace kvpool::methods
