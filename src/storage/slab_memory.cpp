#include "kvpool/storage/slab_memory.h"

#include <cstdint>
#include <new>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#define KVPOOL_MMAP 1
#endif

namespace kvpool::storage {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

#if KVPOOL_MMAP

class SystemMemory : public SlabMemory {
 public:
  explicit SystemMemory(bool huge_pages) : huge_pages_(huge_pages) {}

  std::byte* obtain(std::size_t size) noexcept override {
    const std::size_t kept = mapped(size);
    const bool large = size >= kHugePage;
    // Room to start where a huge page can.
    const std::size_t asked = large ? kept + kHugePage : kept;
    void* const start = ::mmap(nullptr, asked, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    auto* data = static_cast<std::byte*>(start);
    if (!large) return data;
    const std::size_t before =
        (kHugePage - reinterpret_cast<std::uintptr_t>(data) % kHugePage) % kHugePage;
    if (before != 0) ::munmap(data, before);
    data += before;
    if (asked != before + kept) ::munmap(data + kept, asked - before - kept);
#ifdef MADV_HUGEPAGE
    if (huge_pages_) ::madvise(data, kept, MADV_HUGEPAGE);  // advice: no matter if it is not taken
#endif
    return data;
  }

  void give_back(std::byte* data, std::size_t size) noexcept override {
    ::munmap(data, mapped(size));
  }

 private:
  /// Whole pages of any system, so that what is cut off starts at one.
  static std::size_t mapped(std::size_t size) noexcept {
    constexpr std::size_t kPage = std::size_t{64} << 10;
    return size >= kHugePage ? (size + kPage - 1) / kPage * kPage : size;
  }

  bool huge_pages_;
};

#else

class SystemMemory : public SlabMemory {
 public:
  explicit SystemMemory(bool) {}
  std::byte* obtain(std::size_t size) noexcept override {
    return static_cast<std::byte*>(::operator new(size, std::align_val_t(kHugePage), std::nothrow));
  }
  void give_back(std::byte* data, std::size_t) noexcept override {
    ::operator delete(data, std::align_val_t(kHugePage));
  }
};

#endif

}  // namespace

std::shared_ptr<SlabMemory> system_slab_memory(bool huge_pages) {
  return std::make_shared<SystemMemory>(huge_pages);
}

}  // namespace kvpool::storage
