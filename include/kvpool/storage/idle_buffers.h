#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "kvpool/base/aligned_buffer.h"

namespace kvpool::storage {

/// Buffers that no block holds, kept by exact size for the next block that needs one. Not
/// thread-safe.
class IdleBuffers {
 public:
  /// Keeps at most `limit_bytes`; what would pass it is given back to the system.
  explicit IdleBuffers(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  /// An idle buffer of `size` bytes, contents undefined, or a new one. Throws std::bad_alloc.
  AlignedBuffer take(std::size_t size);
  void put(AlignedBuffer buffer) noexcept;
  void clear() noexcept;

  std::size_t bytes() const noexcept { return bytes_; }
  /// Throws Error where the sum does not add up or a buffer lies under another's size.
  void check_invariants() const;

 private:
  std::size_t limit_bytes_;
  std::size_t bytes_ = 0;
  std::map<std::size_t, std::vector<AlignedBuffer>> by_size_;
};

}  // namespace kvpool::storage
