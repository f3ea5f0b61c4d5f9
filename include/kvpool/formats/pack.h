#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvpool/formats/format.h"

namespace kvpool::formats {

/// Index of the first code above traits(format).max_code(), if any. `format` is a code format.
std::optional<std::size_t> first_bad_code(Format format,
                                          std::span<const std::uint8_t> codes) noexcept;

/// Packs a row of codes, one a byte, into row_bytes(format, codes.size()) bytes; unused bits of the
/// last byte become zero. The codes are in range (first_bad_code). `format` is a code format.
void pack_row(Format format, std::span<const std::uint8_t> codes,
              std::span<std::byte> packed) noexcept;

/// The way back: codes.size() codes from row_bytes(format, codes.size()) bytes.
void unpack_row(Format format, std::span<const std::byte> packed,
                std::span<std::uint8_t> codes) noexcept;

}  // namespace kvpool::formats
