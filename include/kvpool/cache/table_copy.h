#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/kernels/page_ref.h"

namespace kvpool::cache {

/// What a copy of a layer's page table elsewhere (on a device) holds, and what has to be written
/// there for it to show another view. Steps add entries at the end and rarely change others, so a
/// view is followed in time that does not depend on its length where its revision is the last
/// one's.
class TableCopy {
 public:
  /// The copy is to show the pages of a view of this revision (PageView::revision). Returns the
  /// entries that have to be written, in order; what lies behind the view's pages may be anything.
  /// Valid until the next call.
  std::span<const std::size_t> follow(std::span<const kernels::PageRef> pages,
                                      std::uint64_t revision);

  /// The copy: the pages of the last view, and what else of that revision was seen.
  std::span<const kernels::PageRef> entries() const noexcept { return entries_; }

 private:
  std::vector<kernels::PageRef> entries_;
  std::uint64_t revision_ = 0;
  std::vector<std::size_t> changed_;
};

}  // namespace kvpool::cache
