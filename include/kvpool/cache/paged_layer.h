#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/cache/append_plan.h"
#include "kvpool/cache/lease_errors.h"
#include "kvpool/cache/page_view.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/stream_layout.h"
#include "kvpool/core/block_handle.h"

namespace kvpool::cache {

class PageTable;

/// One layer of a PagedGroup: its tokens lie in blocks, a key and a value block for each
/// block_size tokens, and are read there through views.
///
/// It keeps the books alone; bytes move when the AppendPlans run. The destructor takes the layer
/// out of its group and gives its blocks back, in whatever thread, and leaves the other layers
/// alone.
///
/// The rule that keeps readers safe: a page's tokens that a view, a fork or a plan may see are
/// never written again. An append past them goes on in the same page; one that would write below
/// them, or to a block with another owner, or to a demoted page, takes a fresh page and copies the
/// tokens that stay.
///
/// After the blocks were freed behind it (free_all of the owner) every use but release(), reset()
/// and the destructor throws LeaseLost.
class PagedLayer {
 public:
  ~PagedLayer();
  PagedLayer(const PagedLayer&) = delete;
  PagedLayer& operator=(const PagedLayer&) = delete;

  const std::shared_ptr<PagedGroup>& group() const noexcept { return group_; }
  const PagedLayerSpec& spec() const noexcept { return spec_; }
  const std::shared_ptr<const StreamLayout>& key_layout() const noexcept { return layouts_[0]; }
  const std::shared_ptr<const StreamLayout>& value_layout() const noexcept { return layouts_[1]; }

  /// Tokens appended and not trimmed, those behind a window included.
  std::int64_t offset() const;
  /// Tokens kept: offset() less what a window gave back.
  std::int64_t length() const;
  /// Position of the first token kept, a multiple of the block size.
  std::int64_t first_position() const;
  /// Blocks held, keys and values together.
  std::int64_t n_blocks() const;
  /// Bytes of their pages, by size class.
  std::int64_t nbytes() const;
  /// False once a window has closed over tokens.
  bool is_trimmable() const;

  /// Charges `n_tokens` (>= 1) more and says where to write them. Throws StepExhausted (no layer
  /// has moved where it is the step's first), LeaseLost and InvalidArgument; then nothing changed.
  std::shared_ptr<const AppendPlan> append(std::int64_t n_tokens);
  /// Puts `n_tokens` (>= 1) in place of what is held, from `first_position` on: a multiple of the
  /// block size, above 0 for what a window left of a longer sequence. It is no step: the other
  /// layers stay, and a step under way is rolled back where it is torn, else ended. Throws
  /// StepExhausted, after which the layer is empty, and InvalidArgument, which changes nothing.
  std::shared_ptr<const AppendPlan> adopt(std::int64_t first_position, std::int64_t n_tokens);
  /// The tokens now. Throws LeaseLost.
  std::shared_ptr<const PageView> view() const;

  /// Drops up to `n_tokens` (>= 0) of the newest tokens and returns how many: as many as the
  /// shortest layer that holds any can, where the other layers are trimmed by the same amount. 0
  /// once any layer's window has closed over tokens. A torn step is rolled back first. Throws
  /// LeaseLost.
  std::int64_t trim(std::int64_t n_tokens);
  /// A step is under way that this layer's next append would find torn.
  bool is_torn() const;
  /// Rolls such a step back. For whoever asks the offset of the step to come.
  void settle();
  /// Takes the newest `n_tokens` of this layer alone back, at most what the last step brought where
  /// the window has closed: for tokens whose plan will never run (see
  /// AppendPlan::run_without_rows). Throws InvalidArgument for more than that, and LeaseLost.
  void roll_back(std::int64_t n_tokens);
  /// How many roll_back() takes.
  std::int64_t most_to_roll_back() const;
  /// Gives this layer's blocks back: it is empty, the other layers stay.
  void reset() noexcept;
  /// PagedGroup::release.
  void release() noexcept { group_->release(); }

  /// A copy at the end of `group`, of the same pool, which shares every block: no bytes are copied
  /// and no block is taken until one of the two writes to a shared one. Throws InvalidArgument for
  /// another pool, and LeaseLost.
  std::unique_ptr<PagedLayer> fork(const std::shared_ptr<PagedGroup>& group) const;

 private:
  friend class PagedGroup;

  /// Of a layer, so that what a step takes in all layers stays far from 63 bits.
  static constexpr std::int64_t kMostTokens = std::int64_t{1} << 48;

  /// How the last, partly filled block takes more tokens: as it is, or from a fresh page.
  struct Tail {
    bool renew[2] = {false, false};
    /// The block has other owners.
    bool shared = false;

    bool any() const noexcept { return renew[0] || renew[1]; }
  };

  PagedLayer(std::shared_ptr<PagedGroup> group, const PagedLayerSpec& spec);
  PagedLayer(std::shared_ptr<PagedGroup> group, const PagedLayer& origin);
  void join();

  // All below: with the group's lock held.
  core::BlockPoolAllocator& blocks() const noexcept { return group_->pool()->blocks(); }
  std::int64_t block_size() const noexcept { return layouts_[0]->shape().block_size; }
  storage::PageStore& pool_store() const noexcept { return group_->pool()->store(); }
  std::int64_t n_entries() const noexcept;
  std::int64_t page_bytes() const noexcept;
  std::int64_t new_entries(std::int64_t n_tokens) const noexcept;
  /// Tokens may be gone: also where fewer than the window's were adopted from a later position.
  bool window_closed() const noexcept {
    return spec_.window > 0 && (offset_ >= spec_.window || first_block_ > 0);
  }
  std::int64_t rollable() const noexcept { return window_closed() ? offset_ - before_ : offset_; }
  bool is_lost() const;
  [[noreturn]] void lost() const;
  void verify() const;
  Tail inspect_tail(bool known_shared = false) const;
  void add_demand(std::int64_t n_tokens, PagedGroup::Demand& demand) const;
  std::shared_ptr<AppendPlan> grow(std::int64_t n_tokens, bool known_shared = false);
  std::shared_ptr<PageTable> table_for(std::int64_t more, bool to_change) const;
  void charge_tail(const Tail& tail, std::int64_t n_used, core::BlockHandle (&own)[2]);
  void demote(AppendPlan& plan) noexcept;
  void demote(int stream, AppendPlan::StreamPlan& plan);
  bool demote_block(int stream, std::int64_t entry, std::size_t level,
                    AppendPlan::StreamPlan& plan);
  bool drop_behind_window(std::int64_t position) noexcept;
  void cut(std::int64_t new_offset);
  void forget() noexcept;
  void check_invariants() const;

  const std::shared_ptr<PagedGroup> group_;
  const PagedLayerSpec spec_;
  std::shared_ptr<const StreamLayout> layouts_[2];  // keys, values
  std::vector<core::FormatTag> tags_[2];            // of the layouts' levels

  std::shared_ptr<PageTable> table_;  // null where there is no block
  std::int64_t offset_ = 0;
  /// Blocks that the window gave back.
  std::int64_t first_block_ = 0;
  /// The offset before the step under way, or before the last one.
  std::int64_t before_ = 0;
  bool moved_ = false;
  bool trimmed_ = false;
  /// The last block was trimmed while it had other owners: the pool counts more slots in use, until
  /// the next append.
  bool fill_lags_ = false;
  /// Of each stream: blocks before this one, counted from position 0, have aged through all tiers;
  /// how far tiers reached at the last look; whether bytes were missing then.
  struct Ageing {
    std::int64_t done = 0;
    std::int64_t reached = 0;
    bool unfinished = false;
  } ageing_[2];
};

}  // namespace kvpool::cache
