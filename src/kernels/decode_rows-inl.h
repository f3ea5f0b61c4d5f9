// Tokens of a page's head as fp32 rows, with vectors. Included once a target.
#if defined(KVPOOL_DECODE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPOOL_DECODE_ROWS_INL_H_
#undef KVPOOL_DECODE_ROWS_INL_H_
#else
#define KVPOOL_DECODE_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "float_lanes-inl.h"
#include "kvpool/formats/page_layout.h"
#include "paged_codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE  // as in paged_rows-inl.h

HWY_INLINE void decode_rows(const formats::PageLayout& layout, const std::byte* page,
                            std::int64_t head, std::int64_t first, std::int64_t count, float* rows,
                            std::int64_t stride) {
  formats::decode_tokens(layout, page, head, first, count, rows, stride);
}

#else

namespace hn = hwy::HWY_NAMESPACE;

template <class Lanes>
HWY_INLINE void decode_floats(const typename Lanes::Number* HWY_RESTRICT from,
                              std::int64_t from_stride, std::int64_t count, std::int64_t dim,
                              float* HWY_RESTRICT rows, std::int64_t stride) {
  const D d;
  const std::int64_t whole = dim - dim % kLanes;
  for (std::int64_t t = 0; t < count; ++t, from += from_stride, rows += stride) {
    for (std::int64_t j = 0; j < whole; j += kLanes) {
      hn::StoreU(Lanes::load(d, from + j), d, rows + j);
    }
    for (std::int64_t j = whole; j < dim; ++j) rows[j] = Lanes::widen(from[j]);
  }
}

/// Quad U of eight, and those after it, of kLanes tokens: dims 4U .. 4U + 3 of the rows of tokens
/// from .. to among them. Rows have `dims` numbers from dim 0 on.
template <int bits, int U = 0>
HWY_INLINE void decode_quads(const std::uint32_t* words, std::int64_t lanes, std::int64_t dims,
                             V scale, V minimum, std::int64_t from, std::int64_t to, float* rows,
                             std::int64_t stride) {
  if constexpr (U < 8) {
    const std::int64_t n = std::min<std::int64_t>(4, dims - 4 * U);
    if (n <= 0) return;
    const VU codes = quad_of<bits, U>(words, lanes);
    HWY_ALIGN float numbers[4 * kLanes];  // [token, dim]
    hn::StoreInterleaved4(hn::MulAdd(dim_of<0>(codes), scale, minimum),
                          hn::MulAdd(dim_of<1>(codes), scale, minimum),
                          hn::MulAdd(dim_of<2>(codes), scale, minimum),
                          hn::MulAdd(dim_of<3>(codes), scale, minimum), D(), numbers);
    if (HWY_LIKELY(n == 4)) {
      for (std::int64_t t = from; t < to; ++t) {
        std::memcpy(rows + t * stride + 4 * U, numbers + 4 * t, 4 * sizeof(float));
      }
    } else {
      for (std::int64_t t = from; t < to; ++t) {
        std::copy_n(numbers + 4 * t, n, rows + t * stride + 4 * U);
      }
    }
    decode_quads<bits, U + 1>(words, lanes, dims, scale, minimum, from, to, rows, stride);
  }
}

/// Products of a scale (11 bits) and a code (8) are exact, so that MulAdd rounds once as
/// decode_tokens does.
template <int bits>
HWY_INLINE void decode_codes(const formats::PageLayout& layout, const std::byte* head,
                             std::int64_t first, std::int64_t count, float* rows,
                             std::int64_t stride) {
  const std::int64_t dim = layout.shape.head_dim;
  const std::int64_t lanes = layout.lanes();
  const std::int64_t last = first + count;
  rows -= first * stride;
  for (std::int64_t t = first / kLanes * kLanes; t < last; t += kLanes) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(head) +
                        (t / lanes * layout.words() * lanes + t % lanes);
    const std::int64_t from = std::max(first - t, std::int64_t{0});
    const std::int64_t to = std::min(last - t, kLanes);
    for (std::int64_t j = 0; j < dim; j += 32) {
      const std::int64_t at = (j / formats::kPageGroup * layout.shape.block_size + t) * 2;
      decode_quads<bits>(words + j / 32 * bits * lanes, lanes, dim - j,
                         load_halves(head + layout.scales_offset() + at),
                         load_halves(head + layout.minimums_offset() + at), from, to,
                         rows + t * stride + j, stride);
    }
  }
}

/// formats::decode_tokens, the same numbers.
HWY_INLINE void decode_rows(const formats::PageLayout& layout, const std::byte* page,
                            std::int64_t head, std::int64_t first, std::int64_t count, float* rows,
                            std::int64_t stride) {
  const std::byte* from = page + head * layout.head_bytes();
  if (!layout.coded()) {
    return with_float_lanes(layout.format, [&](auto kind) {
      using Lanes = decltype(kind);
      decode_floats<Lanes>(
          reinterpret_cast<const typename Lanes::Number*>(from) + first * layout.shape.head_dim,
          layout.shape.head_dim, count, layout.shape.head_dim, rows, stride);
    });
  }
  // Tokens of a vector must lie side by side.
  if (layout.lanes() % kLanes != 0) {
    return formats::decode_tokens(layout, page, head, first, count, rows, stride);
  }
  switch (layout.format) {
    case formats::Format::kInt8:
      return decode_codes<8>(layout, from, first, count, rows, stride);
    case formats::Format::kInt4:
      return decode_codes<4>(layout, from, first, count, rows, stride);
    case formats::Format::kInt3:
      return decode_codes<3>(layout, from, first, count, rows, stride);
    default:
      return decode_codes<2>(layout, from, first, count, rows, stride);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#endif
