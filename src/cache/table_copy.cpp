#include "kvpool/cache/table_copy.h"

namespace kvpool::cache {

std::span<const std::size_t> TableCopy::follow(std::span<const kernels::PageRef> pages,
                                               std::uint64_t revision) {
  changed_.clear();
  std::size_t known = entries_.size();
  if (revision != revision_) {
    // Entries of another revision may be right still, but those behind these pages say nothing of
    // what later views of this revision will show there.
    if (entries_.size() > pages.size()) entries_.resize(pages.size());
    known = 0;
    revision_ = revision;
  }
  for (std::size_t i = known; i < pages.size(); ++i) {
    if (i == entries_.size()) {
      entries_.push_back(pages[i]);
    } else if (entries_[i].data == pages[i].data && entries_[i].format == pages[i].format) {
      continue;
    } else {
      entries_[i] = pages[i];
    }
    changed_.push_back(i);
  }
  return changed_;
}

}  // namespace kvpool::cache
