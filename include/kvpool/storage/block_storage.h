#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "kvpool/core/block_pool_allocator.h"
#include "kvpool/formats/format.h"
#include "kvpool/storage/block_rows.h"

namespace kvpool::storage {

struct StorageOptions {
  /// Zero a block's bytes when its last reference goes, instead of before its next use.
  bool scrub_on_free = false;
  /// Bytes kept for reuse in buffers that no block holds.
  std::size_t idle_limit_bytes = std::size_t{64} << 20;
};

/// The bytes of a pool's blocks: block_size rows of `row_width` numbers each, in the format that
/// the block's tag names (formats/format.h); formats may differ from block to block. It moves bytes
/// and never converts numbers.
///
/// A buffer is made when a block is first read or written and stays with the block's id through
/// frees and checkouts, so a warm pool allocates nothing. It goes when the pool retires the block,
/// on release(), or when the block's next format needs another size. Rows that were not written
/// since the checkout read as zero: no one sees what the last owner left.
///
/// Every method may be called from any thread. Misuse throws InvalidArgument before anything
/// changes: a handle that is stale or of another pool, a write to a shared block, rows past the
/// block's end, a tag that is no format, a new tag of another representation on a block that holds
/// rows.
class BlockStorage {
 public:
  /// So that no block's bytes overflow a size.
  static constexpr std::int64_t kMaxRowWidth = std::int64_t{1} << 20;

  /// `pool` outlives the storage. Throws InvalidArgument where row_width is not in 1..kMaxRowWidth.
  BlockStorage(core::BlockPoolAllocator& pool, std::int64_t row_width, StorageOptions options = {});
  ~BlockStorage();
  BlockStorage(const BlockStorage&) = delete;
  BlockStorage& operator=(const BlockStorage&) = delete;

  std::int64_t row_width() const noexcept;
  const StorageOptions& options() const noexcept;

  /// The format that the block's tag names.
  formats::Format format(const core::BlockHandle& block) const;

  /// Writes whole rows from row `offset` on. `rows` is [n, row_bytes(format, row_width)], encoded
  /// in the block's format; n may be 0. The pool's n_used becomes at least offset + n.
  void write(const core::BlockHandle& block, std::int64_t offset, formats::Format format,
             std::span<const std::byte> rows);

  /// A copy of the block's first n_used rows.
  BlockRows read(const core::BlockHandle& block);
  /// A copy of all block_size rows.
  BlockRows read_all(const core::BlockHandle& block);
  /// All rows where they lie, for kernels: valid while the block's reference lives, it keeps its
  /// format and nobody releases it. Reading while another thread writes the block is a race.
  std::span<const std::byte> bytes(const core::BlockHandle& block);

  /// BlockPoolAllocator::try_writable, and the rows come along.
  [[nodiscard]] std::optional<core::Shortage> try_writable(const core::BlockHandle& block,
                                                           core::BlockHandle& out);

  /// Lets go of the block's buffer; its rows read as zero afterwards. Nothing happens where there
  /// is none, or where the handle is stale and the block has been handed out again.
  void release(const core::BlockHandle& block);

  /// Bytes of the buffers that blocks hold.
  std::size_t resident_bytes() const;
  /// Bytes of the buffers kept for reuse, at most options().idle_limit_bytes.
  std::size_t idle_bytes() const;
  void drop_idle();

  /// Throws Error naming the first thing that does not add up.
  void check_invariants() const;

 private:
  class State;

  BlockRows copy(const char* call, const core::BlockHandle& block, bool all);

  core::BlockPoolAllocator& pool_;
  std::shared_ptr<State> state_;
};

}  // namespace kvpool::storage
