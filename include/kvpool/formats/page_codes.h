#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvpool/formats/page_layout.h"

namespace kvpool::formats {

// How a group of 64 numbers of one token becomes codes: for those who write pages faster than
// encode_group, and have to write the same.

/// minimum + scale * code, both as fp16.
struct GroupGrid {
  std::uint16_t scale;
  std::uint16_t minimum;
};

/// The grid over finite numbers: the minimum is rounded down, and the scale so that the largest
/// number is at most half a step past the last code.
GroupGrid group_grid(float smallest, float largest, std::uint32_t max_code) noexcept;

/// The grid of numbers that are not all finite.
inline constexpr GroupGrid kNanGrid = {0, 0x7e00};

/// 32-bit words that the codes of a whole group take.
template <int bits>
inline constexpr std::int64_t kGroupWords = kPageGroup * bits / 32;

/// Words from the codes of a group's sixteen quads, one code a byte: the inverse of quad_codes.
template <int bits>
constexpr void pack_quads(const std::uint32_t (&quads)[16],
                          std::uint32_t (&words)[kGroupWords<bits>]) noexcept {
  for (std::uint32_t& word : words) word = 0;
  for (int k = 0; k < 16; ++k) {
    if constexpr (bits == 3) {
      words[k / 8 * 3 + k % 8 / 4] |= (quads[k] & 0x03030303u) << (2 * (k % 4));
      words[k / 8 * 3 + 2] |= (quads[k] >> 2 & 0x01010101u) << (k % 8);
    } else {
      constexpr int kQuads = 8 / bits;
      words[k / kQuads] |= quads[k] << (bits * (k % kQuads));
    }
  }
}

/// Where a group of a token lies in its head.
template <class Byte>
struct GroupPlace {
  Byte* words;
  std::int64_t word_stride;  // in bytes
  std::int64_t n_words;
  Byte* scale;
  Byte* minimum;

  GroupPlace(const PageLayout& layout, Byte* head, std::int64_t token,
             std::int64_t group) noexcept {
    const std::int64_t lanes = layout.lanes();
    const std::int64_t per_group = kPageGroup * traits(layout.format).bits / 32;
    const std::int64_t first = group * per_group;
    words = head + ((token / lanes * layout.words() + first) * lanes + token % lanes) * 4;
    word_stride = lanes * 4;
    n_words = std::min(per_group, layout.words() - first);
    const std::int64_t at = (group * layout.shape.block_size + token) * 2;
    scale = head + layout.scales_offset() + at;
    minimum = head + layout.minimums_offset() + at;
  }
};

}  // namespace kvpool::formats
