#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/ids.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::cache {

/// The blocks behind one layer's pair of buffers: batch * ceil(rows / block_size) of keys and as
/// many of values, no more and no less, with n_used of each following the tokens.
///
/// Without a pool (nullptr) it keeps the same numbers and charges nobody.
///
/// Not synchronised. The destructor may run in any thread: it gives back this lease's own handles
/// and nothing else.
class TokenLease {
 public:
  using Pool = core::BlockPoolAllocator;

  TokenLease(std::shared_ptr<Pool> pool, OwnerId owner);
  ~TokenLease();
  TokenLease(TokenLease&& other) noexcept;
  TokenLease& operator=(TokenLease&& other) noexcept;
  TokenLease(const TokenLease&) = delete;
  TokenLease& operator=(const TokenLease&) = delete;

  std::int64_t batch() const noexcept { return batch_; }
  std::int64_t rows() const noexcept { return rows_; }
  /// Rows of each sequence that hold a token.
  std::int64_t used() const noexcept { return used_; }
  /// Blocks held, keys and values together.
  std::int64_t n_blocks() const noexcept { return 2 * n_pairs_; }
  /// Pairs of a key and a value block that `batch` sequences of `rows` rows take.
  std::int64_t pairs_for(std::int64_t batch, std::int64_t rows) const noexcept;
  std::int64_t n_pairs() const noexcept { return n_pairs_; }

  /// Charges `batch` sequences of `rows` rows instead; all or nothing in both directions. New
  /// blocks are empty; used() is cut to `rows`. Throws LeaseLost where the blocks were freed behind
  /// it.
  [[nodiscard]] std::optional<core::Shortage> try_resize(std::int64_t batch, std::int64_t rows);
  /// Sets the rows in use of each sequence, 0..rows(). Touches only blocks whose fill changes, and
  /// always the last one in use. Throws LeaseLost.
  void set_used(std::int64_t used);
  /// Says which of the rows in use are padding and count as held but unused: `counts[i]` rows of
  /// sequence i from row `first` on. Empty `counts`: none. Forgotten when the batch changes. Throws
  /// LeaseLost.
  void set_padding(std::int64_t first, std::vector<std::int64_t> counts);
  std::int64_t padding_first() const noexcept { return padding_first_; }
  const std::vector<std::int64_t>& padding() const noexcept { return padding_; }
  /// Tags the blocks, and those to come.
  void set_formats(core::FormatTag keys, core::FormatTag values);
  core::FormatTag key_format() const noexcept { return key_format_; }
  core::FormatTag value_format() const noexcept { return value_format_; }
  /// Throws LeaseLost where the blocks were freed behind this lease.
  void verify() const;
  /// Gives every block back.
  void release() noexcept;

  /// Throws Error where the handles do not add up or the pool disagrees. For tests.
  void check_invariants() const;

 private:
  /// The handles of block number `first`..`last` - 1 of every sequence, both streams.
  std::span<const core::BlockHandle> columns(std::int64_t first, std::int64_t last) const noexcept;
  bool is_padded(std::int64_t column) const noexcept;
  /// Slots in use of one block where `used` rows are.
  std::int64_t fill(std::int64_t column, std::int64_t sequence, std::int64_t used) const noexcept;
  void mark(std::span<const core::BlockHandle> blocks, std::int64_t n_used) const;
  /// Writes the fill of blocks number `first`..`last` - 1 of every sequence.
  void write_fill(std::int64_t first, std::int64_t last, std::int64_t used) const;
  void forget() noexcept;

  std::shared_ptr<Pool> pool_;
  OwnerId owner_;
  std::int64_t batch_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t used_ = 0;
  std::int64_t n_pairs_ = 0;
  std::int64_t padding_first_ = 0;
  std::vector<std::int64_t> padding_;
  core::FormatTag key_format_{};
  core::FormatTag value_format_{};
  // [block number in its sequence][sequence][key, value]: the tail of all sequences is one span.
  std::vector<core::BlockHandle> handles_;
};

}  // namespace kvpool::cache
