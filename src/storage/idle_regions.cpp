#include "kvpool/storage/idle_regions.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "kvpool/base/error.h"

namespace kvpool::storage {

std::uint64_t IdleRegions::take(std::size_t size, int stream) noexcept {
  const std::lock_guard lock(lock_);
  const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const Idle& idle) {
    return idle.size == size && idle.stream == stream;
  });
  if (found == idle_.rend()) return 0;
  const std::uint64_t address = found->address;
  idle_.erase(std::next(found).base());
  bytes_ -= size;
  return address;
}

void IdleRegions::put(std::size_t size, int stream, std::uint64_t address) noexcept {
  bool kept = false;
  bool too_much = false;
  try {
    const std::lock_guard lock(lock_);
    idle_.push_back({size, stream, address});
    kept = true;
    bytes_ += size;
    too_much = bytes_ > limit_bytes_;
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    // No room to remember it.
  }
  if (!kept) free_(address, size);
  if (too_much) shrink(limit_bytes_ / 2);
}

void IdleRegions::shrink(std::size_t bytes) noexcept {
  for (;;) {
    Idle oldest{};
    {
      const std::lock_guard lock(lock_);
      if (bytes_ <= bytes) return;
      oldest = idle_.front();
      bytes_ -= oldest.size;
      idle_.erase(idle_.begin());
    }
    free_(oldest.address, oldest.size);
  }
}

std::size_t IdleRegions::bytes() const noexcept {
  const std::lock_guard lock(lock_);
  return bytes_;
}

void IdleRegions::check_invariants() const {
  const std::lock_guard lock(lock_);
  std::size_t sum = 0;
  for (const Idle& idle : idle_) sum += idle.size;
  if (sum != bytes_) throw Error("[IdleRegions] bytes are not the sum of the regions");
  if (bytes_ > limit_bytes_) throw Error("[IdleRegions] the limit is exceeded");
}

}  // namespace kvpool::storage
