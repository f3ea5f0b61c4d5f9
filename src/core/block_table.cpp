#include "block_table.h"

namespace kvpool::core {

void BlockTable::make_room(std::int64_t n) {
  const std::size_t needed =
      records_.size() + static_cast<std::size_t>(std::max<std::int64_t>(n - n_retired_, 0));
  if (needed <= records_.capacity()) return;
  // The first call sizes the table exactly; growth by single blocks stays linear in total.
  records_.reserve(std::max(needed, records_.capacity() + records_.capacity() / 2));
}

void BlockTable::mint(int list, Stream stream, std::int64_t n) noexcept {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t index = retired_;
    if (index != kNoReference) {
      BlockRecord& record = records_[index];
      retired_ = record.links.prev;
      --n_retired_;
      // The serial stays: handles of the earlier id must go on being told from hand-made ones.
      record.ever_allocated = record.retired = false;
      record.recycled = true;
    } else {
      index = size_++;
      records_.emplace_back();
    }
    records_[index].id = static_cast<std::uint32_t>(next_id_++);
    records_[index].stream = stream;
    push(list, index);
  }
  lists_[list].managed += n;
}

}  // namespace kvpool::core
