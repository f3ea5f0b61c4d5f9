#include "kvpool/methods/turboquant_mse.h"

#include <algorithm>
#include <utility>

#include "kvpool/methods/packed_codes.h"
#include "kvpool/methods/page_layout.h"
#include "kvpool/methods/value_codec.h"

namespace kvpool::methods {

// Page: scale [capacity], codes [capacity, packed_bytes(head_dim)].

TurboQuantMse::TurboQuantMse(std::shared_ptr<const LinearMap> rotation, int bits, TokenScale scale)
    : StreamCodec(rotation->rows()),
      rotation_(std::move(rotation)),
      levels_(Codebook::of_unit_vectors(head_dim(), bits), scale) {}

std::int64_t TurboQuantMse::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * (2 + packed_bytes(head_dim(), levels_.bits()));
}

std::int64_t TurboQuantMse::scratch_floats(std::int64_t n_tokens) const noexcept {
  return std::max(head_dim(), n_tokens);
}

void TurboQuantMse::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                           float* scratch) const noexcept {
  const std::int64_t row_bytes = packed_bytes(head_dim(), levels_.bits());
  std::uint8_t codes[kMaxDims];
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    rotation_->apply(vectors + t * stride, scratch);
    halves_at(page, 0)[token] = levels_.encode(scratch, head_dim(), codes);
    pack_codes({codes, static_cast<std::size_t>(head_dim())}, levels_.bits(),
               page.data + 2 * page.capacity + token * row_bytes);
  }
}

void TurboQuantMse::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                           kernels::FloatRows out, float* scratch) const noexcept {
  read_magnitudes(halves_at(page, 0) + range.first, range.count, scratch);
  const auto rows =
      code_rows(page, page_bytes(page.capacity), 2 * page.capacity,
                packed_bytes(head_dim(), levels_.bits()), range, head_dim(), levels_.bits());
  kernels.decode_table(rows, levels_.codebook().levels(), scratch, out);
}

void TurboQuantMse::enter(const float* vector, float* code_vector) const noexcept {
  rotation_->apply(vector, code_vector);
}

void TurboQuantMse::leave(const float* code_vector, float* vector) const noexcept {
  rotation_->apply_transposed(code_vector, vector);
}

Method make_turboquant_mse(const KVCacheConfig& config) {
  const auto rotation =
      make_rotation(config.head_dim, static_cast<std::uint64_t>(config.seed),
                    config.as_published ? RotationKind::kHaar : RotationKind::kHadamard);
  const auto bits = static_cast<int>(config.bit_width_inlier);
  return {config, std::make_unique<TurboQuantMse>(rotation, bits, key_scale(config)),
          make_value_codec(config, rotation)};
}

}  // namespace kvpool::methods
