#pragma once

#include <array>
#include <cstdint>

#include "kvpool/kernels/row_kernels.h"

namespace kvpool::kernels {

/// Where sixteen packed codes lie in their 2 * bits bytes, as a byte shuffle into 32-bit lanes and
/// a shift that follows it: for vectors of any length up to sixteen lanes.
struct CodeLanes {
  /// Two bytes of each lane are picked, 0x80 makes a zero.
  alignas(64) std::uint8_t bytes[4 * kRowPadding] = {};
  alignas(64) std::uint32_t shifts[kRowPadding] = {};
};

/// By bits of a code.
inline constexpr std::array<CodeLanes, 9> kCodeLanes = [] {
  std::array<CodeLanes, 9> all;
  for (int bits = 1; bits <= 8; ++bits) {
    for (int i = 0; i < kRowPadding; ++i) {
      const int first = i * bits / 8;
      const int last = (i * bits + bits - 1) / 8;
      auto* bytes = all[static_cast<std::size_t>(bits)].bytes + 4 * i;
      bytes[0] = static_cast<std::uint8_t>(first);
      bytes[1] = last > first ? static_cast<std::uint8_t>(last) : 0x80;
      bytes[2] = bytes[3] = 0x80;
      all[static_cast<std::size_t>(bits)].shifts[i] = static_cast<std::uint32_t>(i * bits % 8);
    }
  }
  return all;
}();

}  // namespace kvpool::kernels
