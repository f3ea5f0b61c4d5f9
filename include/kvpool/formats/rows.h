#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvpool/formats/format.h"

namespace kvpool::formats {

/// Writes a row of numbers as `format` keeps it, into row_bytes(format, values.size()) bytes.
/// Float formats round to nearest even. Code formats drop the fraction (17.7 is code 17) and need
/// the whole part in 0..max_code: otherwise the index of the first number that is not (a NaN
/// included) is returned and `row` is unspecified.
[[nodiscard]] std::optional<std::size_t> encode_row(Format format, std::span<const float> values,
                                                    std::span<std::byte> row) noexcept;

/// The numbers of a row; exact in every format.
void decode_row(Format format, std::span<const std::byte> row, std::span<float> values) noexcept;

}  // namespace kvpool::formats
