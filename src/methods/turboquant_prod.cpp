#include "kvpool/methods/turboquant_prod.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "kvpool/methods/packed_codes.h"
#include "kvpool/methods/page_layout.h"
#include "kvpool/methods/row_math.h"
#include "kvpool/methods/value_codec.h"

namespace kvpool::methods {

// Page: scale of the levels [capacity], scale of the signs [capacity],
// codes [capacity, code_bytes], signs [capacity, sketch.row_bytes].

TurboQuantProd::TurboQuantProd(std::shared_ptr<const LinearMap> rotation, int bits,
                               SignSketch sketch)
    : StreamCodec(rotation->rows()),
      rotation_(std::move(rotation)),
      codebook_(Codebook::of_unit_vectors(head_dim(), bits - 1)),
      sketch_(std::move(sketch)) {}

std::int64_t TurboQuantProd::code_bytes() const noexcept {
  return packed_bytes(head_dim(), codebook_.bits());
}

std::int64_t TurboQuantProd::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * (4 + code_bytes() + sketch_.row_bytes());
}

std::int64_t TurboQuantProd::scratch_floats(std::int64_t n_tokens) const noexcept {
  return std::max(head_dim() + sketch_.n_signs(), n_tokens);
}

std::int64_t TurboQuantProd::constant_bytes() const noexcept {
  return rotation_->memory_bytes() + sketch_.projection().memory_bytes();
}

void TurboQuantProd::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                            float* scratch) const noexcept {
  std::uint8_t codes[kMaxDims];
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    float* rotated = scratch;
    rotation_->apply(vectors + t * stride, rotated);
    const double norm = std::sqrt(squared_norm(rotated, head_dim()));
    const double root = std::sqrt(static_cast<double>(head_dim()));
    const auto unit = static_cast<float>(norm > 0 ? root / norm : 0);
    const Magnitude scale = to_magnitude(static_cast<float>(norm / root));
    halves_at(page, 0)[token] = scale;
    for (std::int64_t i = 0; i < head_dim(); ++i) {
      codes[i] = codebook_.code(rotated[i] * unit);
      // The residual is taken from what will be decoded, so the sketch repairs the scale's
      // rounding.
      rotated[i] -= from_magnitude(scale) * codebook_.level(codes[i]);
    }
    std::byte* rows = page.data + 4 * page.capacity;
    pack_codes({codes, static_cast<std::size_t>(head_dim())}, codebook_.bits(),
               rows + token * code_bytes());
    std::byte* signs = rows + page.capacity * code_bytes();
    halves_at(page, 2 * page.capacity)[token] =
        sketch_.encode(rotated, signs + token * sketch_.row_bytes(), scratch + head_dim());
  }
}

void TurboQuantProd::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                            kernels::FloatRows out, float* scratch) const noexcept {
  const std::int64_t bytes = page_bytes(page.capacity);
  const std::int64_t codes_at = 4 * page.capacity;
  if (codebook_.bits() > 0) {
    read_magnitudes(halves_at(page, 0) + range.first, range.count, scratch);
    const auto rows =
        code_rows(page, bytes, codes_at, code_bytes(), range, head_dim(), codebook_.bits());
    kernels.decode_table(rows, codebook_.levels(), scratch, out);
  } else {
    for (std::int64_t t = 0; t < range.count; ++t) {
      std::fill_n(out.data + t * out.stride, head_dim(), 0.0f);
    }
  }
  read_magnitudes(halves_at(page, 2 * page.capacity) + range.first, range.count, scratch);
  const auto signs = code_rows(page, bytes, codes_at + page.capacity * code_bytes(),
                               sketch_.row_bytes(), range, sketch_.n_signs(), 1);
  kernels.decode_table(signs, SignSketch::kLevels, scratch, {out.data + sketch_at(), out.stride});
}

void TurboQuantProd::enter(const float* vector, float* code_vector) const noexcept {
  rotation_->apply(vector, code_vector);
  std::fill(code_vector + head_dim(), code_vector + sketch_at(), 0.0f);
  sketch_.projection().apply(code_vector, code_vector + sketch_at());
}

void TurboQuantProd::leave(const float* code_vector, float* vector) const noexcept {
  float rotated[kMaxDims];
  sketch_.projection().apply_transposed(code_vector + sketch_at(), rotated);
  for (std::int64_t i = 0; i < head_dim(); ++i) rotated[i] += code_vector[i];
  rotation_->apply_transposed(rotated, vector);
}

Method make_turboquant_prod(const KVCacheConfig& config) {
  // Published: fewer signs for wider codes, which loses more than the codes gain.
  constexpr std::int64_t kPublishedSigns = 64;
  const auto seed = static_cast<std::uint64_t>(config.seed);
  const auto rotation = make_rotation(
      config.head_dim, seed, config.as_published ? RotationKind::kHaar : RotationKind::kHadamard);
  std::int64_t signs = config.head_dim;
  if (config.as_published && config.bit_width_inlier > 2) signs = std::min(signs, kPublishedSigns);
  return {config,
          std::make_unique<TurboQuantProd>(
              rotation, static_cast<int>(config.bit_width_inlier),
              make_sign_sketch(config.jl_dim.value_or(signs), config.head_dim, seed + 1,
                               config.as_published)),
          make_value_codec(config, rotation)};
}

}  // namespace kvpool::methods
