#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>

namespace kvpool::formats {

/// The smallest run of `bits`-wide codes that fills whole bytes, as one little-endian word: code j
/// lies at bit j * bits. For 4 bits that is the even code in the low nibble, for 3 bits eight codes
/// in three bytes. A row is a sequence of groups, cut after its last used byte.
template <int bits>
struct PackedGroup {
  static_assert(bits >= 1 && bits <= 8);

  static constexpr int kNumbers = 8 / std::gcd(bits, 8);
  static constexpr int kBytes = bits * kNumbers / 8;
  static constexpr std::uint32_t kMaxCode = (1u << bits) - 1;

  std::uint8_t bytes[kBytes];

  /// Packs `n` codes, the rest of the group counting as zero. Codes above kMaxCode spill: check
  /// them first.
  static constexpr std::uint32_t word_of(const std::uint8_t* codes, int n) noexcept {
    std::uint32_t word = 0;
    for (int j = 0; j < n; ++j) word |= static_cast<std::uint32_t>(codes[j]) << (j * bits);
    return word;
  }
  static constexpr std::uint8_t code_at(std::uint32_t word, int j) noexcept {
    return static_cast<std::uint8_t>((word >> (j * bits)) & kMaxCode);
  }
};

static_assert(sizeof(PackedGroup<8>) == 1 && PackedGroup<8>::kNumbers == 1);
static_assert(sizeof(PackedGroup<4>) == 1 && PackedGroup<4>::kNumbers == 2);
static_assert(sizeof(PackedGroup<3>) == 3 && PackedGroup<3>::kNumbers == 8);
static_assert(sizeof(PackedGroup<2>) == 1 && PackedGroup<2>::kNumbers == 4);
static_assert(sizeof(PackedGroup<1>) == 1 && PackedGroup<1>::kNumbers == 8);

}  // namespace kvpool::formats
