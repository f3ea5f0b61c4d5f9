#pragma once

#include <cstddef>
#include <span>

#if defined(__SANITIZE_ADDRESS__)
#define KVPOOL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPOOL_ASAN 1
#endif
#endif

#if KVPOOL_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace kvpool::storage {

// Bytes of a free block are nobody's: AddressSanitizer reports whoever still reads them through an
// old pointer as use after free. Nothing in other builds.

inline void poison([[maybe_unused]] std::span<const std::byte> bytes) noexcept {
#if KVPOOL_ASAN
  __asan_poison_memory_region(bytes.data(), bytes.size());
#endif
}

inline void unpoison([[maybe_unused]] std::span<const std::byte> bytes) noexcept {
#if KVPOOL_ASAN
  __asan_unpoison_memory_region(bytes.data(), bytes.size());
#endif
}

}  // namespace kvpool::storage
