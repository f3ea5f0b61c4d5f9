#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kvpool/cache/stream_layout.h"
#include "kvpool/kernels/page_ref.h"

namespace kvpool::cache {

class PageTable;

/// A layer's tokens as they were at one moment. Nothing that happens to the cache later changes
/// what a view shows: as long as it lives its blocks stay in use and its bytes stay put. (Tokens
/// whose AppendPlan has not run yet are shown too: who reads has to see to the order.) Immutable,
/// from any thread.
class PageView {
 public:
  struct Stream {
    /// One a page, oldest first; the array stays where it is as long as the view lives.
    std::span<const kernels::PageRef> pages;
    /// The meaning of the pages, also of those whose format is kCodecPage.
    std::shared_ptr<const StreamLayout> layout;
  };

  PageView(std::shared_ptr<PageTable> table, const Stream& keys, const Stream& values,
           std::int64_t first_position, std::int64_t offset) noexcept;
  ~PageView();
  PageView(const PageView&) = delete;
  PageView& operator=(const PageView&) = delete;

  const Stream& keys() const noexcept { return keys_; }
  const Stream& values() const noexcept { return values_; }
  std::int64_t n_pages() const noexcept { return static_cast<std::int64_t>(keys_.pages.size()); }
  /// Tokens in the pages: all slots but the last page's rest.
  std::int64_t length() const noexcept { return offset_ - first_position_; }
  /// Position of the first page's first token: above 0 where a window has given blocks back, and
  /// always a multiple of the block size.
  std::int64_t first_position() const noexcept { return first_position_; }
  /// Position after the last token.
  std::int64_t offset() const noexcept { return offset_; }
  /// Pages of views with the same revision are the same, as far as both go.
  std::uint64_t revision() const noexcept { return revision_; }
  /// Tokens of the last page, 1..block_size; 0 for a view of nothing.
  std::int64_t last_page_len() const noexcept;

  /// Numbers of tokens first .. first + count (counted from first_position()) of one head of the
  /// keys or values, from pages of whatever level; rows `row_stride` apart. Throws InvalidArgument
  /// out of range, and std::bad_alloc.
  void read_keys(std::int64_t head, std::int64_t first, std::int64_t count, float* rows,
                 std::int64_t row_stride) const {
    read(0, head, first, count, rows, row_stride);
  }
  void read_values(std::int64_t head, std::int64_t first, std::int64_t count, float* rows,
                   std::int64_t row_stride) const {
    read(1, head, first, count, rows, row_stride);
  }

 private:
  void read(int stream, std::int64_t head, std::int64_t first, std::int64_t count, float* rows,
            std::int64_t row_stride) const;

  std::shared_ptr<PageTable> table_;
  Stream keys_;
  Stream values_;
  std::int64_t first_position_;
  std::int64_t offset_;
  std::uint64_t revision_;
};

}  // namespace kvpool::cache
