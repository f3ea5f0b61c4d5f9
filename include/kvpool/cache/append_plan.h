#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cache/stream_layout.h"
#include "kvpool/formats/format.h"
#include "kvpool/storage/page_slot.h"

namespace kvpool::cache {

class PagedPool;

/// Rows of one stream, [n_heads, n_tokens, head_dim] with the last dim dense; strides in numbers.
struct RowSource {
  const void* data = nullptr;
  /// fp32, fp16 or bf16.
  formats::Format format = formats::Format::kFp32;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

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

  /// Writes the rows. Sources have n_tokens() tokens, and the heads and dims of their streams.
  /// Throws InvalidArgument for a source that is not of floats, before anything is written, and
  /// std::bad_alloc.
  void run(const RowSource& keys, const RowSource& values) const;
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
