#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/base/ids.h"
#include "kvpool/core/allocation_stats.h"
#include "kvpool/core/block_handle.h"
#include "kvpool/core/block_info.h"
#include "kvpool/core/pool_config.h"
#include "kvpool/core/pool_observer.h"
#include "kvpool/core/shortage.h"
#include "kvpool/core/stream.h"

namespace kvpool::core {

/// Hands out fixed-size blocks of token slots, counts references to them and keeps the books.
///
/// States of a block and who holds it:
///
///   never used --allocate--> in use (>= 1 references) --last free--> free --allocate--> in use
///        \------------------------- shrink --------------------------/---> retired (id is gone)
///
/// A reader's pin keeps a block that lost its last reference in use, without an owner, until it is
/// unpinned: only then it is free.
///
/// Every method may be called from any thread; each is atomic, and a call that fails (by value or
/// by exception) has changed nothing. Free lists are stacks: the block freed last is handed out
/// first. Misuse throws InvalidArgument before anything changes; running out is a value in the
/// try_ calls and BlockPoolExhausted in their counterparts.
///
/// Streams: with separate_kv pass kKey or kValue (kShared throws); otherwise every stream is
/// treated as kShared.
class BlockPoolAllocator {
 public:
  /// Throws InvalidArgument where `config` is out of range.
  explicit BlockPoolAllocator(PoolConfig config = {});
  ~BlockPoolAllocator();
  BlockPoolAllocator(const BlockPoolAllocator&) = delete;
  BlockPoolAllocator& operator=(const BlockPoolAllocator&) = delete;

  const PoolConfig& config() const noexcept;
  /// Process-wide id, never 0.
  std::uint64_t pool_id() const noexcept;
  /// Blocks that `n_tokens` token slots take: ceil(n_tokens / block_size).
  std::int64_t blocks_for_tokens(std::int64_t n_tokens) const noexcept;

  // --- formats -----------------------------------------------------------------------------------

  /// The tag for `format`, the same for equal names. Throws past 65,535 names.
  FormatTag intern_format(std::string_view format);
  /// The name behind a tag of this pool.
  std::string format_name(FormatTag tag) const;

  // --- owners ------------------------------------------------------------------------------------

  /// Marks `owner` active. Throws OwnerAlreadyActive where it has blocks or is registered. An
  /// explicit registration lasts until release_owner or free_all.
  void register_owner(OwnerId owner);
  /// Clears a registration and any reservation. Silent for an unknown owner; throws where the owner
  /// still has blocks.
  void release_owner(OwnerId owner);
  /// Has blocks, a registration or a reservation.
  bool is_active(OwnerId owner) const;
  /// An id that users never use (such ids are refused unless minted here). Not registered.
  OwnerId new_owner();

  // --- allocate ----------------------------------------------------------------------------------

  /// Checks out `copies` runs of blocks_for_tokens(n_tokens) blocks, each run full but for its last
  /// block, and writes their handles to `out` (whose size must be exactly that), in pop order.
  /// An owner that is not active becomes so. Returns the shortage where blocks are missing.
  [[nodiscard]] std::optional<Shortage> try_allocate(Stream stream, std::int64_t n_tokens,
                                                     OwnerId owner, FormatTag format,
                                                     std::span<BlockHandle> out,
                                                     std::int64_t copies = 1);
  /// The same for keys and values together: both or neither. Without separate_kv both runs come
  /// from the one list.
  [[nodiscard]] std::optional<Shortage> try_allocate_kv(
      std::int64_t n_tokens, OwnerId owner, FormatTag key_format, FormatTag value_format,
      std::span<BlockHandle> keys, std::span<BlockHandle> values, std::int64_t copies = 1);
  /// Throws BlockPoolExhausted where try_allocate returns a shortage.
  std::vector<BlockHandle> allocate(Stream stream, std::int64_t n_tokens, OwnerId owner,
                                    FormatTag format = {}, std::int64_t copies = 1);

  // --- free --------------------------------------------------------------------------------------

  /// Drops the reference behind each handle once; a stale handle is skipped. A foreign handle
  /// anywhere in the list throws and frees nothing. O(1) a block in any order.
  void free(std::span<const BlockHandle> blocks);
  /// Drops every reference of `owner`, its registration and its reservation. Returns how many
  /// references were dropped; 0 for an unknown owner.
  std::int64_t free_all(OwnerId owner) noexcept;

  // --- share -------------------------------------------------------------------------------------

  /// Gives `new_owner`, which must hold no blocks, a reference to each block of `owner`, in the
  /// owner's order. No block leaves the free list.
  std::vector<BlockHandle> fork(OwnerId owner, OwnerId new_owner);
  /// Gives `owner`, which may hold blocks and may be the one that holds these, one more reference
  /// to each of `blocks`, after those it has; their handles go to `out`, which is as long. No block
  /// leaves the free list. Throws for a stale or foreign handle.
  void share(std::span<const BlockHandle> blocks, OwnerId owner, std::span<BlockHandle> out);
  /// Makes `block` the caller's alone: itself where it has one reference, otherwise a fresh block
  /// of the same stream, format and fill that takes its place in the owner's order while the old
  /// reference is dropped. Copying the bytes is the storage's part.
  [[nodiscard]] std::optional<Shortage> try_writable(const BlockHandle& block, BlockHandle& out);
  /// The same for a few blocks of one owner, each named once: all or none. `out` may be `blocks`.
  [[nodiscard]] std::optional<Shortage> try_writable(std::span<const BlockHandle> blocks,
                                                     std::span<BlockHandle> out);

  // --- readers -----------------------------------------------------------------------------------

  /// Keeps each block in use for a reader, whatever becomes of its owners' references, which this
  /// is none of: the block stays writable and markable. Pins are counted. Throws for a stale or
  /// foreign handle anywhere in the list; then nothing is pinned.
  void pin(std::span<const BlockHandle> blocks);
  /// Takes one pin of each block back, by handles that were pinned (stale by now or not). A block
  /// whose last reference is gone goes to its free list with its last pin, and counts as freed
  /// then. Throws for a block that is not pinned; then nothing is unpinned.
  void unpin(std::span<const BlockHandle> blocks);

  // --- fill and format ---------------------------------------------------------------------------

  /// Sets the token slots in use, 0..block_size. Throws for a stale or foreign handle and where the
  /// value would change a block with more than one reference.
  void mark_used(const BlockHandle& block, std::int64_t n_used);
  /// The same value for many blocks under one lock; all or none.
  void mark_used(std::span<const BlockHandle> blocks, std::int64_t n_used);
  /// Re-tags a block; same conditions as mark_used.
  void set_format(const BlockHandle& block, FormatTag format);

  // --- reservations ------------------------------------------------------------------------------

  /// Keeps blocks for `owner`: its own allocations draw on them, nobody else's may. Replaces the
  /// owner's earlier reservation; (0, 0) cancels it. Grows the pool where config allows. Without
  /// separate_kv the sum is reserved of the one list. Makes the owner active.
  [[nodiscard]] std::optional<Shortage> try_reserve(OwnerId owner, std::int64_t n_key_blocks,
                                                    std::int64_t n_value_blocks);
  /// Blocks of `stream` still reserved for `owner`.
  std::int64_t n_reserved(Stream stream, OwnerId owner) const;

  // --- queries -----------------------------------------------------------------------------------

  /// Length of the stream's free list.
  std::int64_t n_free(Stream stream) const;
  /// n_free less every reservation of the stream.
  std::int64_t n_available(Stream stream) const;
  /// What `owner` could allocate of `stream` alone now: free blocks not reserved by others, and
  /// those the pool may still grow by.
  std::int64_t n_allocatable(Stream stream, OwnerId owner) const;
  /// The owner's references in allocation order; empty for an unknown owner.
  std::vector<BlockHandle> blocks_for(OwnerId owner) const;
  /// Empty for a stale handle; throws for a foreign one.
  std::optional<BlockInfo> info(const BlockHandle& block) const;
  AllocationStats stats() const;
  /// The last kHistorySize snapshots, oldest first: one for each allocation or reservation, met or
  /// not, each free, free_all, and each shrink that retired a block.
  std::vector<AllocationStats> history() const;
  static constexpr std::size_t kHistorySize = 256;

  // --- size --------------------------------------------------------------------------------------

  /// Retires free blocks of `stream` until `target_free` are left: never-used ones first, then the
  /// longest free. Reserved blocks stay. Returns how many were retired.
  std::int64_t shrink(Stream stream, std::int64_t target_free);

  /// Adds an observer for as long as it lives.
  void add_observer(std::weak_ptr<PoolObserver> observer);
  void add_pin_observer(std::weak_ptr<PinObserver> observer);

  /// Throws Error naming the first book that does not add up. For tests and fuzzers: O(blocks).
  void check_invariants() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvpool::core
