// Pages of a layer that get narrower as their tokens age.
#include <algorithm>
#include <utility>

#include "kvpool/cache/paged_layer.h"
#include "page_table.h"

namespace kvpool::cache {

using core::BlockHandle;

void PagedLayer::demote(AppendPlan& plan) noexcept {
  AppendPlan::StreamPlan* const plans[2] = {&plan.keys_, &plan.values_};
  for (int s = 0; s < 2; ++s) {
    if (layouts_[s]->levels().size() == 1) continue;
    try {
      demote(s, *plans[s]);
    } catch (...) {                  // NOLINT(bugprone-empty-catch)
      ageing_[s].unfinished = true;  // out of memory: the block stays as it is for now
    }
  }
}

void PagedLayer::demote(int stream, AppendPlan::StreamPlan& plan) {
  const StreamLayout& layout = *layouts_[stream];
  const std::int64_t size = block_size();
  Ageing& ageing = ageing_[stream];
  std::int64_t reached = 0;  // by all tiers: it grows when some block comes of age
  for (const StreamLayout::Level& level : layout.levels().subspan(1)) {
    reached += std::max<std::int64_t>(offset_ - level.after_tokens, 0) / size;
  }
  if (reached == ageing.reached && !ageing.unfinished) return;
  ageing.reached = reached;
  ageing.unfinished = false;
  const std::int64_t aged =
      std::max<std::int64_t>(offset_ - layout.level(1).after_tokens, 0) / size;
  ageing.done = std::max(ageing.done, first_block_);
  for (std::int64_t block = ageing.done; block < aged; ++block) {
    const std::int64_t entry = block - first_block_;
    const std::size_t wanted = layout.level_at(offset_ - (block + 1) * size);
    if (table_->level(stream, entry) < wanted && !demote_block(stream, entry, wanted, plan)) break;
    const bool final = table_->level(stream, entry) + 1 == layout.levels().size();
    if (final && ageing.done == block) ++ageing.done;
  }
}

// False where there are no bytes for the smaller page beside the old one. A block with other owners
// stays as it is.
bool PagedLayer::demote_block(int stream, std::int64_t entry, std::size_t level,
                              AppendPlan::StreamPlan& plan) {
  const BlockHandle& block = table_->blocks(entry, entry + 1)[static_cast<std::size_t>(stream)];
  if (!table_->slot(stream, entry).is_alone()) {
    const auto info = blocks().info(block);
    if (!info || info->n_references > 1) return true;
  }
  const StreamLayout::Level& target = layouts_[stream]->level(level);
  storage::SlotRef page;
  if (pool_store().try_take(target.page_bytes, {&page, 1})) {
    ageing_[stream].unfinished = true;
    return false;
  }
  std::shared_ptr<PageTable> table = table_for(0, true);
  plan.demotions.push_back({table_->slot(stream, entry), page,
                            static_cast<std::uint8_t>(table_->level(stream, entry)),
                            static_cast<std::uint8_t>(level), block_size()});
  try {
    blocks().set_format(block, tags_[stream][level]);
  } catch (...) {
    plan.demotions.pop_back();
    throw;
  }
  page.set_seen(block_size());
  table_ = std::move(table);
  table_->set_page(stream, entry, std::move(page), level, target.ref_format());
  return true;
}

}  // namespace kvpool::cache
