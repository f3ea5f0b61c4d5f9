#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvpool::methods {

/// Bytes of a row of `n` codes; the unused bits of its last byte are zero.
constexpr std::int64_t packed_bytes(std::int64_t n, int bits) noexcept {
  return (n * bits + 7) / 8;
}

/// Packs codes of 1 to 8 bits, each below 2^bits, in little-endian bit order
/// (formats/packed_group.h) into packed_bytes(codes.size(), bits) bytes.
void pack_codes(std::span<const std::uint8_t> codes, int bits, std::byte* packed) noexcept;

}  // namespace kvpool::methods
