// Vector versions of the scalar page kernels. Highway compiles this file once a target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "page_append_simd.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "decode_rows-inl.h"
#include "float_lanes-inl.h"
#include "kvpool/base/half.h"
#include "kvpool/formats/page_codes.h"
#include "kvpool/kernels/page_append.h"
#include "page_copy.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE  // as in paged_rows-inl.h

PageKernels Pages() { return {}; }

#else

namespace hn = hwy::HWY_NAMESPACE;

using formats::kPageGroup;
using formats::PageLayout;

/// Rows of fp32 between two formats; wider rows than this go the scalar way.
constexpr std::int64_t kTile = 4096;

HWY_INLINE std::int64_t tile_tokens(const PageLayout& layout) {
  return kTile / layout.shape.head_dim;
}

template <class Lanes>
HWY_INLINE void narrow_row(const float* from, std::int64_t n, std::byte* row) {
  auto* to = reinterpret_cast<typename Lanes::Number*>(row);
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) Lanes::store(D(), hn::LoadU(D(), from + j), to + j);
  for (; j < n; ++j) to[j] = Lanes::narrow(from[j]);
}

/// formats::encode_group; each operation rounds as it does there, so nothing is fused.
template <int bits>
HWY_INLINE void encode_codes(const formats::GroupPlace<std::byte>& place, const float* row,
                             std::int64_t n) {
  constexpr std::uint32_t kMaxCode = (1u << bits) - 1;
  alignas(64) float numbers[kPageGroup];
  const float* group = row;
  const std::int64_t width = (n + kLanes - 1) / kLanes * kLanes;
  if (width != n) {  // a repeated number changes no range
    std::copy_n(row, n, numbers);
    std::fill(numbers + n, numbers + width, row[0]);
    group = numbers;
  }
  V smallest = hn::LoadU(D(), group);
  V largest = smallest;
  V spread = hn::Zero(D());  // zero if all are finite, else NaN
  for (std::int64_t j = 0; j < width; j += kLanes) {
    const V number = hn::LoadU(D(), group + j);
    smallest = hn::Min(smallest, number);
    largest = hn::Max(largest, number);
    spread = hn::Add(spread, hn::Sub(number, number));
  }
  const bool finite = hn::GetLane(hn::SumOfLanes(D(), spread)) == 0;
  const formats::GroupGrid grid =
      finite ? formats::group_grid(hn::GetLane(hn::MinOfLanes(D(), smallest)),
                                   hn::GetLane(hn::MaxOfLanes(D(), largest)), kMaxCode)
             : formats::kNanGrid;
  std::memcpy(place.scale, &grid.scale, 2);
  std::memcpy(place.minimum, &grid.minimum, 2);
  const float scale = half_to_float(grid.scale);
  const V inverse = hn::Set(D(), scale > 0 ? 1 / scale : 0.0f);
  const V minimum = hn::Set(D(), half_to_float(grid.minimum));
  const V most = hn::Set(D(), static_cast<float>(kMaxCode));
  std::uint32_t quads[kPageGroup / 4] = {};
  auto* codes = reinterpret_cast<std::uint8_t*>(quads);
  const hn::Rebind<std::uint8_t, D> bytes;
  for (std::int64_t j = 0; j < width; j += kLanes) {
    const V steps = hn::Mul(hn::Sub(hn::LoadU(D(), group + j), minimum), inverse);
    const V code = hn::Add(steps, hn::Set(D(), 0.5f));
    const V positive = hn::IfThenElseZero(hn::Gt(code, hn::Zero(D())), code);
    const VI whole = hn::ConvertTo(DI(), hn::Min(positive, most));
    hn::StoreU(hn::DemoteTo(bytes, whole), bytes, codes + j);
  }
  std::fill(codes + n, codes + width, std::uint8_t{0});
  std::uint32_t words[formats::kGroupWords<bits>];
  formats::pack_quads<bits>(quads, words);
  for (std::int64_t w = 0; w < place.n_words; ++w) {
    std::memcpy(place.words + w * place.word_stride, &words[w], 4);
  }
}

template <int bits>
HWY_INLINE void encode_rows_as(const PageLayout& layout, std::byte* head, std::int64_t first,
                               std::int64_t count, const float* rows, std::int64_t stride) {
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t g = 0; g < layout.groups(); ++g) {
      encode_codes<bits>({layout, head, first + t, g}, rows + t * stride + g * kPageGroup,
                         layout.group_size(g));
    }
  }
}

/// formats::encode_tokens
void encode_rows(const PageLayout& layout, std::byte* page, std::int64_t h, std::int64_t first,
                 std::int64_t count, const float* rows, std::int64_t stride) {
  std::byte* head = page + h * layout.head_bytes();
  switch (layout.format) {
    case formats::Format::kInt8:
      return encode_rows_as<8>(layout, head, first, count, rows, stride);
    case formats::Format::kInt4:
      return encode_rows_as<4>(layout, head, first, count, rows, stride);
    case formats::Format::kInt3:
      return encode_rows_as<3>(layout, head, first, count, rows, stride);
    case formats::Format::kInt2:
      return encode_rows_as<2>(layout, head, first, count, rows, stride);
    default:
      break;
  }
  const std::int64_t dim = layout.shape.head_dim;
  const std::int64_t row_bytes = layout.head_bytes() / layout.shape.block_size;
  with_float_lanes(layout.format, [&](auto kind) HWY_ATTR {
    for (std::int64_t t = 0; t < count; ++t) {
      narrow_row<decltype(kind)>(rows + t * stride, dim, head + (first + t) * row_bytes);
    }
  });
}

void append_rows_simd(const PageLayout& layout, std::byte* page, std::int64_t first,
                      std::int64_t count, const SourceRows& rows) noexcept {
  if (rows.format == layout.format) return copy_rows_in(layout, page, first, count, rows);
  const std::int64_t dim = layout.shape.head_dim;
  if (dim > kTile) return scalar_page_kernels().append_rows(layout, page, first, count, rows);
  const std::int64_t number_bytes = formats::traits(rows.format).bits / 8;
  alignas(64) float tile[kTile];
  for (std::int64_t h = 0; h < layout.shape.n_heads; ++h) {
    for (std::int64_t t = 0; t < count; t += tile_tokens(layout)) {
      const std::int64_t n = std::min(tile_tokens(layout), count - t);
      const std::byte* from =
          rows.data + (h * rows.head_stride + t * rows.token_stride) * number_bytes;
      with_float_lanes(rows.format, [&](auto kind) HWY_ATTR {
        using Lanes = decltype(kind);
        decode_floats<Lanes>(reinterpret_cast<const typename Lanes::Number*>(from),
                             rows.token_stride, n, dim, tile, dim);
      });
      encode_rows(layout, page, h, first + t, n, tile, dim);
    }
  }
}

void gather_rows_simd(const PageLayout& layout, const std::byte* page, std::int64_t first,
                      std::int64_t count, const TargetRows& rows) noexcept {
  if (rows.format == layout.format) return copy_rows_out(layout, page, first, count, rows);
  const std::int64_t dim = layout.shape.head_dim;
  if (dim > kTile) return scalar_page_kernels().gather_rows(layout, page, first, count, rows);
  const std::int64_t number_bytes = formats::traits(rows.format).bits / 8;
  alignas(64) float tile[kTile];
  for (std::int64_t h = 0; h < layout.shape.n_heads; ++h) {
    for (std::int64_t t = 0; t < count; t += tile_tokens(layout)) {
      const std::int64_t n = std::min(tile_tokens(layout), count - t);
      std::byte* to = rows.data + (h * rows.head_stride + t * rows.token_stride) * number_bytes;
      decode_rows(layout, page, h, first + t, n, tile, dim);
      with_float_lanes(rows.format, [&](auto kind) HWY_ATTR {
        for (std::int64_t i = 0; i < n; ++i) {
          narrow_row<decltype(kind)>(tile + i * dim, dim,
                                     to + i * rows.token_stride * number_bytes);
        }
      });
    }
  }
}

void convert_page_simd(const PageLayout& from_layout, const std::byte* from,
                       const PageLayout& to_layout, std::byte* to, std::int64_t n_tokens) noexcept {
  if (from_layout == to_layout) return copy_page(from_layout, from, to);
  const std::int64_t dim = from_layout.shape.head_dim;
  if (dim > kTile) {
    return scalar_page_kernels().convert_page(from_layout, from, to_layout, to, n_tokens);
  }
  alignas(64) float tile[kTile];
  for (std::int64_t h = 0; h < from_layout.shape.n_heads; ++h) {
    for (std::int64_t t = 0; t < n_tokens; t += tile_tokens(from_layout)) {
      const std::int64_t n = std::min(tile_tokens(from_layout), n_tokens - t);
      decode_rows(from_layout, from, h, t, n, tile, dim);
      encode_rows(to_layout, to, h, t, n, tile, dim);
    }
  }
}

void decode_head_simd(const PageLayout& layout, const std::byte* page, std::int64_t head,
                      std::int64_t first, std::int64_t count, float* rows,
                      std::int64_t row_stride) noexcept {
  decode_rows(layout, page, head, first, count, rows, row_stride);
}

PageKernels Pages() {
  return {hwy::TargetName(HWY_TARGET), append_rows_simd, gather_rows_simd, convert_page_simd,
          decode_head_simd};
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "page_append_simd.h"
#include "simd_dispatch.h"

namespace kvpool::kernels {

HWY_EXPORT(Pages);

std::vector<PageKernels> simd_page_kernels() {
  return made_kernels(HWY_DISPATCH_TABLE(Pages),
                      [](const PageKernels& kernels) { return kernels.append_rows != nullptr; });
}

}  // namespace kvpool::kernels
#endif
