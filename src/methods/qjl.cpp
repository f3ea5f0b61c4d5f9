#include "kvpool/methods/qjl.h"

#include <algorithm>
#include <utility>

#include "kvpool/methods/page_layout.h"
#include "kvpool/methods/value_codec.h"

namespace kvpool::methods {

// Page: scale [capacity], signs [capacity, sketch.row_bytes].

Qjl::Qjl(SignSketch sketch) noexcept
    : StreamCodec(sketch.projection().columns()), sketch_(std::move(sketch)) {}

std::int64_t Qjl::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * (2 + sketch_.row_bytes());
}

std::int64_t Qjl::scratch_floats(std::int64_t n_tokens) const noexcept {
  return std::max(sketch_.n_signs(), n_tokens);
}

std::int64_t Qjl::constant_bytes() const noexcept { return sketch_.projection().memory_bytes(); }

void Qjl::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                 float* scratch) const noexcept {
  std::byte* signs = page.data + 2 * page.capacity;
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    halves_at(page, 0)[token] =
        sketch_.encode(vectors + t * stride, signs + token * sketch_.row_bytes(), scratch);
  }
}

void Qjl::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                 kernels::FloatRows out, float* scratch) const noexcept {
  read_magnitudes(halves_at(page, 0) + range.first, range.count, scratch);
  const auto signs = code_rows(page, page_bytes(page.capacity), 2 * page.capacity,
                               sketch_.row_bytes(), range, sketch_.n_signs(), 1);
  kernels.decode_table(signs, SignSketch::kLevels, scratch, out);
}

void Qjl::enter(const float* vector, float* code_vector) const noexcept {
  sketch_.projection().apply(vector, code_vector);
}

void Qjl::leave(const float* code_vector, float* vector) const noexcept {
  sketch_.projection().apply_transposed(code_vector, vector);
}

Method make_qjl(const KVCacheConfig& config) {
  const auto seed = static_cast<std::uint64_t>(config.seed);
  const std::int64_t signs = config.jl_dim.value_or(config.head_dim);
  return {config,
          std::make_unique<Qjl>(
              make_sign_sketch(signs, config.head_dim, seed + 1, config.as_published)),
          make_value_codec(config, make_rotation(config.head_dim, seed))};
}

}  // namespace kvpool::methods
