#include "kvpool/storage/idle_buffers.h"

#include <new>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool::storage {

AlignedBuffer IdleBuffers::take(std::size_t size) {
  const auto found = by_size_.find(size);
  if (found == by_size_.end() || found->second.empty()) return AlignedBuffer(size);
  AlignedBuffer buffer = std::move(found->second.back());
  found->second.pop_back();
  bytes_ -= size;
  return buffer;
}

void IdleBuffers::put(AlignedBuffer buffer) noexcept {
  const std::size_t size = buffer.size();
  if (size == 0 || size > limit_bytes_ - bytes_) return;
  try {
    by_size_[size].push_back(std::move(buffer));
  } catch (const std::bad_alloc&) {
    return;  // no room to remember it: the buffer is freed instead, which is always right
  }
  bytes_ += size;
}

void IdleBuffers::clear() noexcept {
  by_size_.clear();
  bytes_ = 0;
}

void IdleBuffers::check_invariants() const {
  std::size_t sum = 0;
  for (const auto& [size, buffers] : by_size_) {
    for (const AlignedBuffer& buffer : buffers) {
      if (buffer.size() != size) throw Error("[IdleBuffers] a buffer lies under another's size");
      sum += buffer.size();
    }
  }
  if (sum != bytes_) throw Error("[IdleBuffers] bytes are not the sum of the buffers");
  if (bytes_ > limit_bytes_) throw Error("[IdleBuffers] the limit is exceeded");
}

}  // namespace kvpool::storage
