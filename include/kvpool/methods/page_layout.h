#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/methods/magnitude.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

// A page is a sequence of arrays: first those of 16-bit numbers, so that each starts on an even
// address, then the packed codes, so that the page's end is where a kernel must stop reading.

inline std::uint16_t* halves_at(Page page, std::int64_t offset) noexcept {
  return reinterpret_cast<std::uint16_t*>(page.data + offset);
}
inline const std::uint16_t* halves_at(ConstPage page, std::int64_t offset) noexcept {
  return reinterpret_cast<const std::uint16_t*>(page.data + offset);
}

/// out[i] = the magnitude's value.
inline void read_magnitudes(const std::uint16_t* magnitudes, std::int64_t n, float* out) noexcept {
  for (std::int64_t i = 0; i < n; ++i) out[i] = from_magnitude(magnitudes[i]);
}

/// The code rows of tokens `range` of an array of packed rows that starts at `offset`.
inline kernels::CodeRows code_rows(ConstPage page, std::int64_t page_bytes, std::int64_t offset,
                                   std::int64_t row_bytes, TokenRange range, std::int64_t n_codes,
                                   int bits) noexcept {
  return {page.data + offset + range.first * row_bytes,
          page.data + page_bytes,
          row_bytes,
          range.count,
          n_codes,
          bits};
}

}  // namespace kvpool::methods
