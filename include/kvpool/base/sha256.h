#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvpool {

/// SHA-256 (FIPS 180-4) of bytes.
using Sha256 = std::array<std::uint8_t, 32>;

Sha256 sha256(std::string_view bytes);

/// In hexadecimal, 64 characters.
std::string to_hex(const Sha256& digest);

}  // namespace kvpool
