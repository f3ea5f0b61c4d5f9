#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <utility>

namespace kvpool {

/// Owned bytes that start on a cache line, so that vector loads of rows do not straddle two more
/// often than they must. Movable, not copyable; contents start undefined.
class AlignedBuffer {
 public:
  static constexpr std::size_t kAlignment = 64;

  AlignedBuffer() noexcept = default;
  /// Throws std::bad_alloc. Zero bytes take no memory.
  explicit AlignedBuffer(std::size_t size)
      : data_(size == 0
                  ? nullptr
                  : static_cast<std::byte*>(::operator new(size, std::align_val_t(kAlignment)))),
        size_(size) {}
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    if (this != &other) {
      release();
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  ~AlignedBuffer() { release(); }

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::span<std::byte> bytes() noexcept { return {data_, size_}; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

  void zero() noexcept {
    if (size_ != 0) std::memset(data_, 0, size_);
  }

 private:
  void release() noexcept {
    ::operator delete(data_, std::align_val_t(kAlignment));
    data_ = nullptr;
    size_ = 0;
  }

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvpool
