#include <mutex>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/cache/paged_layer.h"
#include "page_table.h"

namespace kvpool::cache {

std::shared_ptr<const AppendPlan> PagedLayer::adopt(std::int64_t first_position,
                                                    std::int64_t n_tokens) {
  if (first_position < 0 || first_position % block_size() != 0 ||
      (first_position > 0 && spec_.window == 0)) {
    throw InvalidArgument(
        std::string("[PagedLayer::adopt] first_position must be ") +
        (spec_.window == 0 ? "0 without a window" : "a multiple of the block size, >= 0") +
        ", got " + std::to_string(first_position));
  }
  if (n_tokens < 1 || first_position > kMostTokens - n_tokens) {
    throw InvalidArgument(
        "[PagedLayer::adopt] n_tokens must be >= 1 and lead to no more than 2^48, got " +
        std::to_string(n_tokens));
  }
  PagedGroup& group = *group_;
  const std::lock_guard guard(group.lock_);
  if (group.torn()) group.undo_step();
  group.close_step();
  forget();
  offset_ = before_ = first_position;
  first_block_ = first_position / block_size();
  try {
    return grow(n_tokens);
  } catch (...) {
    forget();
    throw;
  }
}

}  // namespace kvpool::cache
