#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvpool::formats {

/// How the numbers of a block lie in memory. The int formats hold bare unsigned codes,
/// 0..2^bits - 1, packed: what a code means (scale, codebook) is its writer's business.
enum class Format : std::uint8_t { kFp32, kFp16, kBf16, kInt8, kInt4, kInt3, kInt2, kInt1 };

enum class Kind : std::uint8_t { kFloat, kCode };

/// What every loop over formats needs to know of one: the library, its tests, the documentation and
/// the Python names all read this table.
struct FormatTraits {
  Format format{};
  /// The tag that users write, and the format's name in Python.
  std::string_view name;
  Kind kind{};
  int bits = 0;
  /// The smallest run of numbers that fills whole bytes, and those bytes.
  int group_numbers = 0;
  int group_bytes = 0;

  /// Codes are 0..max_code; meaningless for floats.
  constexpr std::uint32_t max_code() const noexcept {
    return kind == Kind::kCode ? (1u << bits) - 1 : 0;
  }
};

inline constexpr std::array<FormatTraits, 8> kFormats = {{
    {Format::kFp32, "fp32", Kind::kFloat, 32, 1, 4},
    {Format::kFp16, "fp16", Kind::kFloat, 16, 1, 2},
    {Format::kBf16, "bf16", Kind::kFloat, 16, 1, 2},
    {Format::kInt8, "int8", Kind::kCode, 8, 1, 1},
    {Format::kInt4, "int4", Kind::kCode, 4, 2, 1},
    {Format::kInt3, "int3", Kind::kCode, 3, 8, 3},
    {Format::kInt2, "int2", Kind::kCode, 2, 4, 1},
    {Format::kInt1, "int1", Kind::kCode, 1, 8, 1},
}};

constexpr const FormatTraits& traits(Format format) noexcept {
  return kFormats[static_cast<std::size_t>(format)];
}

/// Empty for a name that is not in the table.
std::optional<Format> format_from_name(std::string_view name) noexcept;
/// "fp32, fp16, ...": for messages.
std::string format_names();

/// Bytes of a row of `width` numbers: the last byte is filled up with zero bits.
constexpr std::size_t row_bytes(Format format, std::size_t width) noexcept {
  return (width * static_cast<std::size_t>(traits(format).bits) + 7) / 8;
}

/// Bytes of one format mean the same in the other, so that a block may be re-tagged where it lies.
/// True only for the same layout and the same kind of number: fp16 and bf16 differ.
constexpr bool same_representation(Format a, Format b) noexcept {
  const FormatTraits& x = traits(a);
  const FormatTraits& y = traits(b);
  return a == b || (x.kind == Kind::kCode && y.kind == Kind::kCode && x.bits == y.bits);
}

}  // namespace kvpool::formats
