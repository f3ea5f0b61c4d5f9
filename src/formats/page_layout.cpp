#include "kvpool/formats/page_layout.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/half.h"
#include "kvpool/formats/page_codes.h"
#include "kvpool/formats/rows.h"

namespace kvpool::formats {
namespace {

static_assert(std::endian::native == std::endian::little, "words of codes are little endian");

constexpr std::uint16_t kLargestHalf = 0x7bff;

/// The largest half <= value, -65504 at least.
std::uint16_t half_below(float value) noexcept {
  std::uint16_t bits = float_to_half(value);
  if (half_to_float(bits) > value) {
    if ((bits & 0x7fff) == 0) {
      bits = 0x8001;
    } else {
      bits = static_cast<std::uint16_t>(bits & 0x8000 ? bits + 1 : bits - 1);
    }
  }
  // Which of two zeros is the smaller one is left open to whoever looks for it.
  if (bits == 0x8000) return 0;
  return bits == 0xfc00 ? 0xfbff : bits;
}

template <int bits>
void encode(const GroupPlace<std::byte>& place, const float* numbers, std::int64_t n) noexcept {
  constexpr std::uint32_t kMaxCode = (1u << bits) - 1;
  const auto [smallest, largest] = std::minmax_element(numbers, numbers + n);
  const bool finite =
      std::all_of(numbers, numbers + n, [](float number) { return std::isfinite(number); });
  const GroupGrid grid = finite ? group_grid(*smallest, *largest, kMaxCode) : kNanGrid;
  std::memcpy(place.scale, &grid.scale, 2);
  std::memcpy(place.minimum, &grid.minimum, 2);
  const float scale = half_to_float(grid.scale);
  const float inverse = scale > 0 ? 1 / scale : 0;
  const float minimum = half_to_float(grid.minimum);
  std::uint32_t quads[kPageGroup / 4] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    const float code = (numbers[i] - minimum) * inverse + 0.5f;
    // Written so that a NaN, in a group that is NaN anyway, becomes code 0.
    const float kept = code > 0 ? std::min(code, static_cast<float>(kMaxCode)) : 0.0f;
    quads[i / 4] |= static_cast<std::uint32_t>(kept) << (8 * (i % 4));
  }
  std::uint32_t words[kGroupWords<bits>];
  pack_quads<bits>(quads, words);
  for (std::int64_t w = 0; w < place.n_words; ++w) {
    std::memcpy(place.words + w * place.word_stride, &words[w], 4);
  }
}

template <int bits>
void decode(const GroupPlace<const std::byte>& place, float* numbers, std::int64_t n) noexcept {
  std::uint16_t scale_bits;
  std::uint16_t minimum_bits;
  std::memcpy(&scale_bits, place.scale, 2);
  std::memcpy(&minimum_bits, place.minimum, 2);
  const float scale = half_to_float(scale_bits);
  const float minimum = half_to_float(minimum_bits);
  const auto word = [&](std::int64_t w) {
    std::uint32_t bits_of_word;
    std::memcpy(&bits_of_word, place.words + w * place.word_stride, 4);
    return bits_of_word;
  };
  for (std::int64_t i = 0; i < n; i += 4) {
    const std::uint32_t codes = quad_codes<bits>(i / 4, word);
    for (std::int64_t j = 0; j < std::min<std::int64_t>(4, n - i); ++j) {
      numbers[i + j] = minimum + scale * static_cast<float>(codes >> (8 * j) & 0xff);
    }
  }
}

/// Bytes of a float group: numbers g * 64 .. of a row.
template <class Byte>
Byte* float_group(const PageLayout& layout, Byte* head, std::int64_t token,
                  std::int64_t g) noexcept {
  return head + (token * layout.shape.head_dim + g * kPageGroup) * (traits(layout.format).bits / 8);
}

}  // namespace

GroupGrid group_grid(float smallest, float largest, std::uint32_t max_code) noexcept {
  const std::uint16_t minimum = half_below(smallest);
  const auto steps = static_cast<float>(max_code);
  const float lowest = half_to_float(minimum);
  const float range = largest > lowest ? largest - lowest : 0;
  std::uint16_t scale = std::min(float_to_half(range / steps), kLargestHalf);
  if (half_to_float(scale) * (steps + 0.5f) < range && scale < kLargestHalf) ++scale;
  return {scale, minimum};
}

void check_page(std::string_view call, const PageLayout& layout) {
  const auto refuse = [&](const std::string& what) {
    throw InvalidArgument("[" + std::string(call) + "] " + what);
  };
  if (std::ranges::find(kPageFormats, layout.format) == kPageFormats.end()) {
    refuse(
        "format must be one that a page can have (fp32, fp16, bf16, int8, int4, int3, int2), "
        "got " +
        std::string(traits(layout.format).name));
  }
  // Eight bytes a number bound every format, scales included.
  std::int64_t room = std::numeric_limits<std::int64_t>::max() / 64;
  for (const auto& [name, size] : {std::pair{"n_heads", layout.shape.n_heads},
                                   {"block_size", layout.shape.block_size},
                                   {"head_dim", layout.shape.head_dim}}) {
    if (size < 1) refuse(std::string(name) + " must be >= 1, got " + std::to_string(size));
    if (size > room) refuse(std::string(name) + " is too large, got " + std::to_string(size));
    room /= size;
  }
}

void encode_group(const PageLayout& layout, std::byte* page, std::int64_t head, std::int64_t token,
                  std::int64_t g, const float* numbers) noexcept {
  std::byte* to = page + head * layout.head_bytes();
  const std::int64_t n = layout.group_size(g);
  switch (layout.format) {
    case Format::kInt8:
      return encode<8>({layout, to, token, g}, numbers, n);
    case Format::kInt4:
      return encode<4>({layout, to, token, g}, numbers, n);
    case Format::kInt3:
      return encode<3>({layout, to, token, g}, numbers, n);
    case Format::kInt2:
      return encode<2>({layout, to, token, g}, numbers, n);
    default: {
      const auto width = static_cast<std::size_t>(n);
      [[maybe_unused]] const auto bad =
          encode_row(layout.format, {numbers, width},
                     {float_group(layout, to, token, g), row_bytes(layout.format, width)});
    }
  }
}

void decode_group(const PageLayout& layout, const std::byte* page, std::int64_t head,
                  std::int64_t token, std::int64_t g, float* numbers) noexcept {
  const std::byte* from = page + head * layout.head_bytes();
  const std::int64_t n = layout.group_size(g);
  switch (layout.format) {
    case Format::kInt8:
      return decode<8>({layout, from, token, g}, numbers, n);
    case Format::kInt4:
      return decode<4>({layout, from, token, g}, numbers, n);
    case Format::kInt3:
      return decode<3>({layout, from, token, g}, numbers, n);
    case Format::kInt2:
      return decode<2>({layout, from, token, g}, numbers, n);
    default: {
      const auto width = static_cast<std::size_t>(n);
      decode_row(layout.format,
                 {float_group(layout, from, token, g), row_bytes(layout.format, width)},
                 {numbers, width});
    }
  }
}

void encode_tokens(const PageLayout& layout, std::byte* page, std::int64_t head, std::int64_t first,
                   std::int64_t count, const float* rows, std::int64_t row_stride) noexcept {
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t g = 0; g < layout.groups(); ++g) {
      encode_group(layout, page, head, first + t, g, rows + t * row_stride + g * kPageGroup);
    }
  }
}

void decode_tokens(const PageLayout& layout, const std::byte* page, std::int64_t head,
                   std::int64_t first, std::int64_t count, float* rows,
                   std::int64_t row_stride) noexcept {
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t g = 0; g < layout.groups(); ++g) {
      decode_group(layout, page, head, first + t, g, rows + t * row_stride + g * kPageGroup);
    }
  }
}

}  // namespace kvpool::formats
