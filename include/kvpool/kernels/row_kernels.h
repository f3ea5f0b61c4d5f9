#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvpool::kernels {

/// Rows of floats that these kernels read and write are padded: their stride is a multiple of this,
/// which every vector length they use divides. What lies in the padding is finite but means
/// nothing, so queries carry zeros there.
inline constexpr std::int64_t kRowPadding = 16;

constexpr std::int64_t padded_row(std::int64_t dims) noexcept {
  return (dims + kRowPadding - 1) / kRowPadding * kRowPadding;
}

/// Rows of packed codes: little-endian bit order (formats/packed_group.h), each row on a byte of
/// its own.
struct CodeRows {
  const std::byte* codes = nullptr;
  /// One past the last byte that may be read; vector loads stay below it.
  const std::byte* end = nullptr;
  /// From one row to the next.
  std::int64_t row_bytes = 0;
  std::int64_t n_rows = 0;
  /// Codes in a row.
  std::int64_t n_codes = 0;
  /// Bits of a code, 1..8.
  int bits = 0;
};

/// [n_rows, stride] floats; stride is a multiple of kRowPadding.
struct FloatRows {
  float* data = nullptr;
  std::int64_t stride = 0;
};
struct ConstFloatRows {
  const float* data = nullptr;
  std::int64_t stride = 0;
};

/// The running state of one query's softmax: weights are relative to exp(largest).
struct RunningSoftmax {
  float largest;
  float total;
};

/// The inner loops of attention over quantised keys and values, for one kind of vector
/// instructions. Raw pointers, no allocation, no state; equal inputs give equal bits on one
/// machine.
struct RowKernels {
  /// The instructions it uses: "AVX3", "NEON", ... or "scalar".
  std::string_view target;

  /// out[r][i] = scales[r] * table[code[r][i]]; `table` has max(16, 2^bits) floats.
  void (*decode_table)(const CodeRows& rows, const float* table, const float* scales,
                       FloatRows out) noexcept;

  /// out[r][i] = code[r][i] * step[i] + zero[i]; both have padded_row(n_codes) floats.
  void (*decode_columns)(const CodeRows& rows, const float* step, const float* zero,
                         FloatRows out) noexcept;

  /// out[r][i] = code[r][i] * step[r][i / group] + zero[r][i / group], n_codes / group of each a
  /// row; group divides n_codes.
  void (*decode_groups)(const CodeRows& rows, std::int64_t group, const float* step,
                        const float* zero, FloatRows out) noexcept;

  /// One level of a tree of polar coordinates: out[r][i] = in[r][i] * cosine[code[r][i]] and
  /// out[r][n_codes + i] = in[r][i] * sine[code[r][i]]. Tables as for decode_table. A row of `out`
  /// has room for padded_row(n_codes) + n_codes floats, `in` and `out` do not overlap.
  void (*decode_polar)(const CodeRows& rows, const float* cosine, const float* sine,
                       ConstFloatRows in, FloatRows out) noexcept;

  /// out[r][i] = scales[r] * codes[r * dims + i].
  void (*decode_int8)(const std::int8_t* codes, std::int64_t n_rows, std::int64_t dims,
                      const float* scales, FloatRows out) noexcept;

  /// out[r][i] = the half (bfloat16) float bits[r * dims + i], exactly.
  void (*decode_half)(const std::uint16_t* bits, std::int64_t n_rows, std::int64_t dims,
                      FloatRows out) noexcept;
  void (*decode_bfloat16)(const std::uint16_t* bits, std::int64_t n_rows, std::int64_t dims,
                          FloatRows out) noexcept;

  /// scores[r] = <query, row r> over `width` floats, a multiple of kRowPadding.
  void (*dot_rows)(const float* query, ConstFloatRows rows, std::int64_t n_rows, std::int64_t width,
                   float* scores) noexcept;

  /// Turns `n` scores into weights exp(score - largest), `largest` being the new running one, adds
  /// them to the total, and returns the factor that earlier sums shrink by. `scores` has room for
  /// padded_row(n) floats, n >= 1.
  float (*soften)(float* scores, std::int64_t n, RunningSoftmax& state) noexcept;

  /// sum[i] = shrink * sum[i] + sum_r weights[r] * rows[r][i] over `width` floats, a multiple of
  /// kRowPadding.
  void (*add_rows)(const float* weights, ConstFloatRows rows, std::int64_t n_rows,
                   std::int64_t width, float shrink, float* sum) noexcept;
};

/// Those that this machine can run, fastest first; the last one is scalar_row_kernels().
std::span<const RowKernels> all_row_kernels();

/// The fastest one.
const RowKernels& row_kernels();

/// The meaning of each kernel in plain C++: the oracle of the tests and the fallback.
const RowKernels& scalar_row_kernels() noexcept;

}  // namespace kvpool::kernels
