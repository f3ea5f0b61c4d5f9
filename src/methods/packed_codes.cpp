#include "kvpool/methods/packed_codes.h"

namespace kvpool::methods {

void pack_codes(std::span<const std::uint8_t> codes, int bits, std::byte* packed) noexcept {
  std::uint32_t word = 0;
  int used = 0;
  for (const std::uint8_t code : codes) {
    word |= static_cast<std::uint32_t>(code) << used;
    used += bits;
    for (; used >= 8; used -= 8, word >>= 8) *packed++ = static_cast<std::byte>(word & 0xffu);
  }
  if (used > 0) *packed = static_cast<std::byte>(word & 0xffu);
}

}  // namespace kvpool::methods
