#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvpool::core {

/// The logical stream a block belongs to: keys, values, or both where the pool has one free list.
enum class Stream : std::uint8_t { kKey, kValue, kShared };

inline constexpr int kStreamCount = 3;

/// "k", "v" or "kv".
constexpr std::string_view name(Stream stream) noexcept {
  constexpr std::string_view names[] = {"k", "v", "kv"};
  return names[static_cast<int>(stream)];
}

}  // namespace kvpool::core
