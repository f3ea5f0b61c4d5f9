#include "kvpool/methods/exact_rows.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "kvpool/base/half.h"
#include "kvpool/methods/page_layout.h"

namespace kvpool::methods {

using formats::Format;

std::int64_t ExactRows::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * static_cast<std::int64_t>(
                        formats::row_bytes(format_, static_cast<std::size_t>(head_dim())));
}

void ExactRows::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                       float*) const noexcept {
  const auto dims = static_cast<std::size_t>(head_dim());
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::span<const float> vector(vectors + t * stride, dims);
    std::byte* row = page.data + page_bytes(range.first + t);
    const std::span<std::uint16_t> halves(reinterpret_cast<std::uint16_t*>(row), dims);
    switch (format_) {
      case Format::kFp16:
        float_to_half(vector, halves);
        break;
      case Format::kBf16:
        float_to_bfloat16(vector, halves);
        break;
      default:
        std::memcpy(row, vector.data(), vector.size_bytes());
    }
  }
}

void ExactRows::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                       kernels::FloatRows out, float*) const noexcept {
  const std::byte* row = page.data + page_bytes(range.first);
  const auto* halves = reinterpret_cast<const std::uint16_t*>(row);
  switch (format_) {
    case Format::kFp16:
      return kernels.decode_half(halves, range.count, head_dim(), out);
    case Format::kBf16:
      return kernels.decode_bfloat16(halves, range.count, head_dim(), out);
    default:
      for (std::int64_t t = 0; t < range.count; ++t) {
        std::memcpy(out.data + t * out.stride, row + page_bytes(t),
                    static_cast<std::size_t>(page_bytes(1)));
      }
  }
}

}  // namespace kvpool::methods
