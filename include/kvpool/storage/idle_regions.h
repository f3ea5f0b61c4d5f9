#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace kvpool::storage {

/// Regions of a device's memory, by address, that nobody uses, kept for whoever needs one of the
/// same size on the same stream: what is on its way there and may still touch the region comes
/// first. Thread-safe.
class IdleRegions {
 public:
  /// Must not throw.
  using Free = std::function<void(std::uint64_t address, std::size_t size)>;

  /// Keeps `limit_bytes` at most. When that is passed the oldest go, down to half of it: to free
  /// device memory may be to wait for the device, so it is done seldom.
  IdleRegions(std::size_t limit_bytes, Free free)
      : limit_bytes_(limit_bytes), free_(std::move(free)) {}

  /// The region of this size and stream that was put last, or 0.
  std::uint64_t take(std::size_t size, int stream) noexcept;
  void put(std::size_t size, int stream, std::uint64_t address) noexcept;
  /// Frees the oldest until no more than so many bytes are left.
  void shrink(std::size_t bytes) noexcept;

  std::size_t bytes() const noexcept;
  /// Throws Error where the sum does not add up or passes the limit.
  void check_invariants() const;

 private:
  struct Idle {
    std::size_t size;
    int stream;
    std::uint64_t address;
  };

  std::size_t limit_bytes_;
  Free free_;
  mutable std::mutex lock_;
  std::size_t bytes_ = 0;
  std::vector<Idle> idle_;  // the oldest first
};

}  // namespace kvpool::storage
