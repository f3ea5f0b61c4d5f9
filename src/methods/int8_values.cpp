#include "kvpool/methods/int8_values.h"

#include <algorithm>
#include <cmath>

#include "kvpool/methods/magnitude.h"
#include "kvpool/methods/page_layout.h"

namespace kvpool::methods {

// Page: scale [capacity], codes [capacity, head_dim].

std::int64_t Int8Values::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * (2 + head_dim());
}

void Int8Values::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                        float*) const noexcept {
  for (std::int64_t t = 0; t < range.count; ++t) {
    const float* vector = vectors + t * stride;
    float largest = 0;
    for (std::int64_t i = 0; i < head_dim(); ++i) largest = std::max(largest, std::abs(vector[i]));
    const Magnitude magnitude = to_magnitude(largest / 127);
    // Codes follow the scale as it is kept, not as it was before rounding.
    const float scale = from_magnitude(magnitude);
    const float inverse = scale > 0 ? 1 / scale : 0;
    halves_at(page, 0)[range.first + t] = magnitude;
    auto* codes = reinterpret_cast<std::int8_t*>(page.data + 2 * page.capacity) +
                  (range.first + t) * head_dim();
    for (std::int64_t i = 0; i < head_dim(); ++i) {
      codes[i] = static_cast<std::int8_t>(
          std::clamp(std::nearbyint(vector[i] * inverse), -127.0f, 127.0f));
    }
  }
}

void Int8Values::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                        kernels::FloatRows out, float* scratch) const noexcept {
  read_magnitudes(halves_at(page, 0) + range.first, range.count, scratch);
  const auto* codes = reinterpret_cast<const std::int8_t*>(page.data + 2 * page.capacity);
  kernels.decode_int8(codes + range.first * head_dim(), range.count, head_dim(), scratch, out);
}

}  // namespace kvpool::methods
