#include "kvpool/kernels/page_append.h"

#include <vector>

#if KVPOOL_HAVE_HIGHWAY
#include "page_append_simd.h"
#endif

namespace kvpool::kernels {

std::span<const PageKernels> all_page_kernels() {
  static const std::vector<PageKernels> kernels = [] {
    std::vector<PageKernels> list;
#if KVPOOL_HAVE_HIGHWAY
    list = simd_page_kernels();
#endif
    list.push_back(scalar_page_kernels());
    return list;
  }();
  return kernels;
}

const PageKernels& page_kernels() { return all_page_kernels().front(); }

void append_rows(const formats::PageLayout& layout, std::byte* page, std::int64_t first,
                 std::int64_t count, const SourceRows& rows) noexcept {
  page_kernels().append_rows(layout, page, first, count, rows);
}

void gather_rows(const formats::PageLayout& layout, const std::byte* page, std::int64_t first,
                 std::int64_t count, const TargetRows& rows) noexcept {
  page_kernels().gather_rows(layout, page, first, count, rows);
}

void convert_page(const formats::PageLayout& from_layout, const std::byte* from,
                  const formats::PageLayout& to_layout, std::byte* to,
                  std::int64_t n_tokens) noexcept {
  page_kernels().convert_page(from_layout, from, to_layout, to, n_tokens);
}

void decode_head(const formats::PageLayout& layout, const std::byte* page, std::int64_t head,
                 std::int64_t first, std::int64_t count, float* rows,
                 std::int64_t row_stride) noexcept {
  page_kernels().decode_head(layout, page, head, first, count, rows, row_stride);
}

}  // namespace kvpool::kernels
