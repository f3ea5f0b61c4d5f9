#include "kvpool/formats/rows.h"
#include "kvpool/kernels/page_append.h"
#include "page_copy.h"

namespace kvpool::kernels {
namespace {

using formats::kPageGroup;
using formats::PageLayout;

/// Calls use(head, token, group, bytes of that group in `rows`, its numbers) for every group.
template <class Byte, class Use>
void for_each_group(const PageLayout& layout, std::int64_t count, const HeadRows<Byte>& rows,
                    Use use) noexcept {
  const std::int64_t number_bytes = formats::traits(rows.format).bits / 8;
  for (std::int64_t h = 0; h < layout.shape.n_heads; ++h) {
    for (std::int64_t t = 0; t < count; ++t) {
      for (std::int64_t g = 0; g < layout.groups(); ++g) {
        const std::int64_t at = h * rows.head_stride + t * rows.token_stride + g * kPageGroup;
        const auto width = static_cast<std::size_t>(layout.group_size(g));
        use(h, t, g,
            std::span<Byte>(rows.data + at * number_bytes, formats::row_bytes(rows.format, width)),
            width);
      }
    }
  }
}

void append_rows_scalar(const PageLayout& layout, std::byte* page, std::int64_t first,
                        std::int64_t count, const SourceRows& rows) noexcept {
  if (rows.format == layout.format) return copy_rows_in(layout, page, first, count, rows);
  float numbers[kPageGroup];
  for_each_group(layout, count, rows, [&](auto h, auto t, auto g, auto bytes, auto width) {
    formats::decode_row(rows.format, bytes, {numbers, width});
    formats::encode_group(layout, page, h, first + t, g, numbers);
  });
}

void gather_rows_scalar(const PageLayout& layout, const std::byte* page, std::int64_t first,
                        std::int64_t count, const TargetRows& rows) noexcept {
  if (rows.format == layout.format) return copy_rows_out(layout, page, first, count, rows);
  float numbers[kPageGroup];
  for_each_group(layout, count, rows, [&](auto h, auto t, auto g, auto bytes, auto width) {
    formats::decode_group(layout, page, h, first + t, g, numbers);
    // A float format takes every number.
    [[maybe_unused]] const auto bad = formats::encode_row(rows.format, {numbers, width}, bytes);
  });
}

void convert_page_scalar(const PageLayout& from_layout, const std::byte* from,
                         const PageLayout& to_layout, std::byte* to,
                         std::int64_t n_tokens) noexcept {
  if (from_layout == to_layout) return copy_page(from_layout, from, to);
  float numbers[kPageGroup];
  for (std::int64_t h = 0; h < from_layout.shape.n_heads; ++h) {
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      for (std::int64_t g = 0; g < from_layout.groups(); ++g) {
        formats::decode_group(from_layout, from, h, t, g, numbers);
        formats::encode_group(to_layout, to, h, t, g, numbers);
      }
    }
  }
}

}  // namespace

const PageKernels& scalar_page_kernels() noexcept {
  static constexpr PageKernels kKernels = {"scalar", append_rows_scalar, gather_rows_scalar,
                                           convert_page_scalar, formats::decode_tokens};
  return kKernels;
}

}  // namespace kvpool::kernels
