#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cache/stream_layout.h"
#include "kvpool/kernels/page_append.h"
#include "kvpool/storage/page_slot.h"

namespace kvpool::cache {

class PagedPool;

/// Where one append's tokens go. It is made when the tokens are charged and carried out later, in
/// whatever thread, once or never; it keeps the memory that it touches, whatever becomes of the
/// cache. Plans of one layer, and those of a fork after those of its origin from before, run in the
/// order in which they were made. Immutable.
class AppendPlan {
 public:
  /// Tokens source_row .. of the source that go to one page.
  struct Piece {
    storage::SlotRef page;
    std::int64_t first_slot = 0;
    std::int64_t count = 0;
    std::int64_t source_row = 0;
  };
  /// Tokens that move between pages: a block's own copy of a shared tail, a full block's smaller
  /// page.
  struct Conversion {
    storage::SlotRef from;
    storage::SlotRef to;
    std::uint8_t from_level = 0;
    std::uint8_t to_level = 0;
    std::int64_t n_tokens = 0;
  };
  struct StreamPlan {
    std::shared_ptr<const StreamLayout> layout;
    /// Before the rows are written.
    std::vector<Conversion> copies;
    /// In level 0.
    std::vector<Piece> pieces;
    /// After that.
    std::vector<Conversion> demotions;
  };

  AppendPlan(std::shared_ptr<PagedPool> pool, std::int64_t n_tokens) noexcept
      : pool_(std::move(pool)), n_tokens_(n_tokens) {}

  std::int64_t n_tokens() const noexcept { return n_tokens_; }
  const StreamPlan& keys() const noexcept { return keys_; }
  const StreamPlan& values() const noexcept { return values_; }
  /// Moves pages besides writing rows.
  bool moves_pages() const noexcept;

  /// Writes the rows: n_tokens() tokens, of the heads and dims of their streams.
  /// Throws InvalidArgument for a source that is not of floats, before anything is written, and
  /// std::bad_alloc.
  void run(const kernels::SourceRows& keys, const kernels::SourceRows& values) const;
  /// For an append whose rows will never come, before its tokens are rolled back: zeros in their
  /// place, and what else the plan moves.
  void run_without_rows() const;

 private:
  friend class PagedLayer;

  std::shared_ptr<PagedPool> pool_;  // the slots' store must outlive them: first
  std::int64_t n_tokens_;
  StreamPlan keys_;
  StreamPlan values_;
};

}  // namespace kvpool::cache
