#pragma once

#include <cstring>

#include "kvpool/kernels/page_append.h"

// What needs no conversion, the same for every target.

namespace kvpool::kernels {

/// Calls copy(place in the page, place in the rows, bytes) for each run of bytes that is whole on
/// both sides; the page has the rows' float format.
template <class PageByte, class RowByte, class Copy>
void for_each_run(const formats::PageLayout& layout, PageByte* page, std::int64_t first,
                  std::int64_t count, const HeadRows<RowByte>& rows, Copy copy) noexcept {
  const std::int64_t number_bytes = formats::traits(layout.format).bits / 8;
  const std::int64_t row_bytes = layout.shape.head_dim * number_bytes;
  const bool dense = rows.token_stride == layout.shape.head_dim;
  for (std::int64_t h = 0; h < layout.shape.n_heads; ++h) {
    PageByte* in_page = page + h * layout.head_bytes() + first * row_bytes;
    RowByte* row = rows.data + h * rows.head_stride * number_bytes;
    if (dense) {
      copy(in_page, row, static_cast<std::size_t>(count * row_bytes));
      continue;
    }
    for (std::int64_t t = 0; t < count; ++t) {
      copy(in_page + t * row_bytes, row + t * rows.token_stride * number_bytes,
           static_cast<std::size_t>(row_bytes));
    }
  }
}

inline void copy_rows_in(const formats::PageLayout& layout, std::byte* page, std::int64_t first,
                         std::int64_t count, const SourceRows& rows) noexcept {
  for_each_run(
      layout, page, first, count, rows,
      [](std::byte* to, const std::byte* from, std::size_t n) { std::memcpy(to, from, n); });
}

inline void copy_rows_out(const formats::PageLayout& layout, const std::byte* page,
                          std::int64_t first, std::int64_t count, const TargetRows& rows) noexcept {
  for_each_run(
      layout, page, first, count, rows,
      [](const std::byte* from, std::byte* to, std::size_t n) { std::memcpy(to, from, n); });
}

inline void copy_page(const formats::PageLayout& layout, const std::byte* from,
                      std::byte* to) noexcept {
  std::memcpy(to, from, static_cast<std::size_t>(layout.page_bytes()));
}

}  // namespace kvpool::kernels
