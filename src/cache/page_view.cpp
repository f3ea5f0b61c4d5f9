#include "kvpool/cache/page_view.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "page_table.h"

namespace kvpool::cache {

PageView::PageView(std::shared_ptr<PageTable> table, const Stream& keys, const Stream& values,
                   std::int64_t first_position, std::int64_t offset) noexcept
    : table_(std::move(table)),
      keys_(keys),
      values_(values),
      first_position_(first_position),
      offset_(offset),
      revision_(table_ == nullptr ? 0 : table_->revision()) {}

PageView::~PageView() {
  if (table_ != nullptr) table_->remove_reader();
}

std::int64_t PageView::last_page_len() const noexcept {
  if (n_pages() == 0) return 0;
  return length() - (n_pages() - 1) * keys_.layout->shape().block_size;
}

void PageView::read(int stream, std::int64_t head, std::int64_t first, std::int64_t count,
                    float* rows, std::int64_t row_stride) const {
  const StreamLayout& layout = stream == 0 ? *keys_.layout : *values_.layout;
  const formats::PageShape& shape = layout.shape();
  if (head < 0 || head >= shape.n_heads || first < 0 || count < 0 || first > length() - count) {
    throw InvalidArgument("[PageView::read] head " + std::to_string(head) + " of " +
                          std::to_string(shape.n_heads) + ", tokens " + std::to_string(first) +
                          " .. " + std::to_string(first) + " + " + std::to_string(count) + " of " +
                          std::to_string(length()) + " are out of range");
  }
  while (count > 0) {
    const std::int64_t page = first / shape.block_size;
    const std::int64_t slot = first % shape.block_size;
    const std::int64_t n = std::min(count, shape.block_size - slot);
    layout.decode(table_->level(stream, page), table_->slot(stream, page).data(), head, slot, n,
                  rows, row_stride);
    first += n;
    count -= n;
    rows += n * row_stride;
  }
}

}  // namespace kvpool::cache
