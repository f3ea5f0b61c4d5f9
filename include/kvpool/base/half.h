#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace kvpool {

// IEEE 754 binary16 ("half") and bfloat16 numbers as their bits. Narrowing rounds to nearest, ties
// to even; what is too large becomes infinity; a NaN stays a NaN (quieted, its upper payload kept).
// Widening is exact.

constexpr float half_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x400u) {  // zero or subnormal: magnitude * 2^-24 is exact
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

constexpr std::uint16_t float_to_half(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round past the largest half, 65504
    return static_cast<std::uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 lets the FPU round to a multiple of 2^-24, a subnormal's unit.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((magnitude - (112u << 23)) >> 13));
}

constexpr float bfloat16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The same for many numbers; both spans have the same length.

void half_to_float(std::span<const std::uint16_t> bits, std::span<float> values) noexcept;
void float_to_half(std::span<const float> values, std::span<std::uint16_t> bits) noexcept;
void bfloat16_to_float(std::span<const std::uint16_t> bits, std::span<float> values) noexcept;
void float_to_bfloat16(std::span<const float> values, std::span<std::uint16_t> bits) noexcept;

}  // namespace kvpool
