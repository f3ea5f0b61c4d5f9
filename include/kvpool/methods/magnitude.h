#pragma once

#include <bit>
#include <cstdint>

namespace kvpool::methods {

/// Norms and scales as 16 bits: no sign, 7 bits of exponent, 9 of fraction. Half floats end at
/// 65504 while a key of moderate numbers may have a larger norm; this reaches from 2^-62 to 2^64
/// (all whose square fits fp32) with a relative error of at most 2^-10. Smaller ones become zero,
/// larger ones the largest.
using Magnitude = std::uint16_t;

/// `value` >= 0 and finite; rounds to nearest, ties to even.
constexpr Magnitude to_magnitude(float value) noexcept {
  constexpr std::uint32_t kLowest = 65u << 23;  // the bits of 2^-62
  constexpr std::uint32_t kBias = 64u << 9;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (bits < kLowest) return 0;
  const std::uint32_t rounded = ((bits + 0x1fffu + ((bits >> 14) & 1u)) >> 14) - kBias;
  return static_cast<Magnitude>(rounded < 0xffffu ? rounded : 0xffffu);
}

constexpr float from_magnitude(Magnitude magnitude) noexcept {
  if (magnitude == 0) return 0;
  return std::bit_cast<float>((static_cast<std::uint32_t>(magnitude) + (64u << 9)) << 14);
}

/// What appends accept: norms of such numbers are magnitudes, and their products with queries of
/// the same size finite.
inline constexpr float kLargestInput = 0x1p56f;

}  // namespace kvpool::methods
