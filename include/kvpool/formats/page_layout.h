#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>

#include "kvpool/formats/format.h"

namespace kvpool::formats {

/// The numbers of one page: n_heads x block_size tokens x head_dim. A page is the memory of one
/// block of one layer's keys or values.
struct PageShape {
  std::int64_t n_heads = 0;
  std::int64_t block_size = 0;
  std::int64_t head_dim = 0;

  bool operator==(const PageShape&) const = default;
};

/// The formats that a page can have.
inline constexpr std::array<Format, 7> kPageFormats = {Format::kFp32, Format::kFp16, Format::kBf16,
                                                       Format::kInt8, Format::kInt4, Format::kInt3,
                                                       Format::kInt2};

/// Codes share a scale and a minimum in groups of this many numbers along head_dim; a head's last
/// group may be shorter (80 = 64 + 16).
inline constexpr std::int64_t kPageGroup = 64;

/// How a page's numbers lie. Head h takes head_bytes() from h * head_bytes().
///
/// Floats are rows without gaps: [block_size, head_dim].
///
/// Codes lie so that a vector instruction meets the same dims of many tokens. Tokens are cut into
/// runs of lanes() (16 where 16 divides block_size), and a head is
///
///   codes     [block_size / lanes, words, lanes]  32-bit words, little endian
///   scales    [groups, block_size]                fp16
///   minimums  [groups, block_size]                fp16
///
/// with number ~ minimum + scale * code. Byte b of a token's words holds dims b, b + 4, b + 8, ...;
/// quad k is the dims 4k .. 4k + 3, one code in each byte of a word (see quad_codes):
///
///   int8   quad k is word k
///   int4   two quads a word: bits 4 (k % 2) .. of each byte of word k / 2
///   int2   four quads a word: bits 2 (k % 4) .. of word k / 4
///   int3   three words for eight quads: two like int2 with the low bits, one with the high bits,
///          bit k % 8 of each byte
///
/// So 4-bit pages take 4.5 bits a number at a head_dim that 64 divides. Nothing of a token shares a
/// byte with another token.
struct PageLayout {
  Format format{};
  PageShape shape;

  bool operator==(const PageLayout&) const = default;

  constexpr bool coded() const noexcept { return traits(format).kind == Kind::kCode; }
  constexpr std::int64_t groups() const noexcept {
    return (shape.head_dim + kPageGroup - 1) / kPageGroup;
  }
  /// Numbers of group g.
  constexpr std::int64_t group_size(std::int64_t g) const noexcept {
    const std::int64_t rest = shape.head_dim - g * kPageGroup;
    return rest < kPageGroup ? rest : kPageGroup;
  }
  /// Tokens whose words lie side by side.
  constexpr std::int64_t lanes() const noexcept {
    return std::gcd(shape.block_size, std::int64_t{16});
  }
  /// 32-bit words of codes that a token takes.
  constexpr std::int64_t words() const noexcept {
    const std::int64_t bits = traits(format).bits;
    if (bits == 3) return (shape.head_dim + 31) / 32 * 3;
    return (shape.head_dim * bits + 31) / 32;
  }
  /// From a head's start to its first scale.
  constexpr std::int64_t scales_offset() const noexcept { return shape.block_size * words() * 4; }
  constexpr std::int64_t minimums_offset() const noexcept {
    return scales_offset() + groups() * shape.block_size * 2;
  }
  constexpr std::int64_t head_bytes() const noexcept {
    if (!coded()) return shape.block_size * shape.head_dim * (traits(format).bits / 8);
    return minimums_offset() + groups() * shape.block_size * 2;
  }
  constexpr std::int64_t page_bytes() const noexcept { return shape.n_heads * head_bytes(); }
};

static_assert(PageLayout{Format::kInt4, {1, 16, 128}}.page_bytes() * 8 == 16 * 128 * 4.5);
static_assert(PageLayout{Format::kFp16, {8, 16, 128}}.page_bytes() ==
              std::int64_t{8} * 16 * 128 * 2);

/// The codes of quad k, one a byte, from the words of a token: word(i) is its i-th.
template <int bits, class Word>
constexpr std::uint32_t quad_codes(std::int64_t k, Word word) noexcept {
  if constexpr (bits == 8) {
    return word(k);
  } else if constexpr (bits == 3) {
    const std::uint32_t low = word(k / 8 * 3 + k % 8 / 4) >> (2 * (k % 4)) & 0x03030303u;
    return low | (word(k / 8 * 3 + 2) >> (k % 8) & 0x01010101u) << 2;
  } else {
    constexpr std::int64_t kQuads = 8 / bits;
    constexpr std::uint32_t kMask = 0x01010101u * ((1u << bits) - 1);
    return word(k / kQuads) >> (bits * (k % kQuads)) & kMask;
  }
}

/// Throws InvalidArgument, named after `call`, for a format that no page has and for a shape whose
/// sizes are not positive or whose bytes leave 64 bits.
void check_page(std::string_view call, const PageLayout& layout);

/// Writes the numbers of group g of one token and head. Float formats round to nearest even. Codes
/// round to the nearest: the error is at most half a scale, except past fp16's range, where numbers
/// saturate. A group with a number that is not finite reads back as NaN. What is written depends on
/// nothing but the numbers.
void encode_group(const PageLayout& layout, std::byte* page, std::int64_t head, std::int64_t token,
                  std::int64_t g, const float* numbers) noexcept;

/// The way back; floats are exact, codes are minimum + scale * code in fp32.
void decode_group(const PageLayout& layout, const std::byte* page, std::int64_t head,
                  std::int64_t token, std::int64_t g, float* numbers) noexcept;

/// encode_group for `count` rows of head_dim numbers, row_stride apart: tokens first ..
/// first + count of a head.
void encode_tokens(const PageLayout& layout, std::byte* page, std::int64_t head, std::int64_t first,
                   std::int64_t count, const float* rows, std::int64_t row_stride) noexcept;

/// decode_group for whole rows.
void decode_tokens(const PageLayout& layout, const std::byte* page, std::int64_t head,
                   std::int64_t first, std::int64_t count, float* rows,
                   std::int64_t row_stride) noexcept;

}  // namespace kvpool::formats
