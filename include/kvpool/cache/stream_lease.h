#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/ids.h"
#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::cache {

/// The blocks behind a sequence whose keys and values come one after the other: ceil(n /
/// block_size) of each stream for its own number of tokens, all full but the last one. (TokenLease
/// charges keys and values alike, for caches that get them together.)
///
/// Not synchronised. The destructor may run in any thread: it gives back this lease's own handles
/// and nothing else.
class StreamLease {
 public:
  using Pool = core::BlockPoolAllocator;

  /// `format` tags the blocks. Throws InvalidArgument where there is no pool.
  StreamLease(std::shared_ptr<Pool> pool, OwnerId owner, core::FormatTag format);
  ~StreamLease();
  StreamLease(const StreamLease&) = delete;
  StreamLease& operator=(const StreamLease&) = delete;

  OwnerId owner() const noexcept { return owner_; }
  std::int64_t n_keys() const noexcept { return keys_.n_tokens; }
  std::int64_t n_values() const noexcept { return values_.n_tokens; }
  /// Blocks held, keys and values together.
  std::int64_t n_blocks() const noexcept {
    return static_cast<std::int64_t>(keys_.blocks.size() + values_.blocks.size());
  }

  /// Charges that many tokens instead: both streams or neither. Blocks past the new end go back,
  /// the last one first. Throws InvalidArgument for a negative number and LeaseLost where the
  /// blocks were freed behind it.
  [[nodiscard]] std::optional<core::Shortage> try_resize(std::int64_t n_keys,
                                                         std::int64_t n_values);
  /// Throws LeaseLost where the last blocks were freed behind this lease.
  void verify() const;
  /// Gives every block back.
  void release() noexcept;

  /// Throws Error where the handles do not add up or the pool disagrees.
  void check_invariants() const;

 private:
  struct Side {
    core::Stream stream;
    std::int64_t n_tokens = 0;
    std::vector<core::BlockHandle> blocks;
  };
  struct Demand {
    std::int64_t n_blocks = 0;
    /// Tokens that lie in those blocks.
    std::int64_t n_tokens = 0;
  };

  /// What `side` needs besides what it holds; room for the handles is made.
  Demand demand(Side& side, std::int64_t n_tokens) const;
  std::optional<core::Shortage> grow(const Demand& keys, const Demand& values);
  std::optional<core::Shortage> grow(Side& side, const Demand& demand);
  void settle(Side& side, std::int64_t n_tokens);
  void mark(const core::BlockHandle& block, std::int64_t n_used) const;
  [[noreturn]] void lost() const;

  std::shared_ptr<Pool> pool_;
  OwnerId owner_;
  core::FormatTag format_;
  Side keys_{core::Stream::kKey};
  Side values_{core::Stream::kValue};
};

}  // namespace kvpool::cache
