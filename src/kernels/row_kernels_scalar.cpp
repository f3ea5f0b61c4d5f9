#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvpool/base/half.h"
#include "kvpool/kernels/row_kernels.h"

namespace kvpool::kernels {
namespace {

unsigned code_at(const CodeRows& rows, std::int64_t row, std::int64_t i) noexcept {
  const std::byte* bytes = rows.codes + row * rows.row_bytes;
  const std::int64_t bit = i * rows.bits;
  const std::int64_t shift = bit % 8;
  unsigned word = std::to_integer<unsigned>(bytes[bit / 8]);
  if (shift + rows.bits > 8) word |= std::to_integer<unsigned>(bytes[bit / 8 + 1]) << 8;
  return (word >> shift) & ((1u << rows.bits) - 1);
}

/// out[r][i] = value(r, i, code) for every code.
template <class Value>
void decode(const CodeRows& rows, FloatRows out, Value value) noexcept {
  for (std::int64_t r = 0; r < rows.n_rows; ++r) {
    for (std::int64_t i = 0; i < rows.n_codes; ++i) {
      out.data[r * out.stride + i] = value(r, i, code_at(rows, r, i));
    }
  }
}

void decode_table(const CodeRows& rows, const float* table, const float* scales,
                  FloatRows out) noexcept {
  decode(rows, out, [&](auto r, auto, unsigned code) { return scales[r] * table[code]; });
}

void decode_columns(const CodeRows& rows, const float* step, const float* zero,
                    FloatRows out) noexcept {
  decode(rows, out,
         [&](auto, auto i, unsigned code) { return static_cast<float>(code) * step[i] + zero[i]; });
}

void decode_groups(const CodeRows& rows, std::int64_t group, const float* step, const float* zero,
                   FloatRows out) noexcept {
  const std::int64_t n_groups = rows.n_codes / group;
  decode(rows, out, [&](auto r, auto i, unsigned code) {
    const std::int64_t g = r * n_groups + i / group;
    return static_cast<float>(code) * step[g] + zero[g];
  });
}

void decode_polar(const CodeRows& rows, const float* cosine, const float* sine, ConstFloatRows in,
                  FloatRows out) noexcept {
  for (std::int64_t r = 0; r < rows.n_rows; ++r) {
    for (std::int64_t i = 0; i < rows.n_codes; ++i) {
      const unsigned code = code_at(rows, r, i);
      const float radius = in.data[r * in.stride + i];
      out.data[r * out.stride + i] = radius * cosine[code];
      out.data[r * out.stride + rows.n_codes + i] = radius * sine[code];
    }
  }
}

/// out[r][i] = value(r, number[r * dims + i]).
template <class Number, class Value>
void widen(const Number* numbers, std::int64_t n_rows, std::int64_t dims, FloatRows out,
           Value value) noexcept {
  for (std::int64_t r = 0; r < n_rows; ++r) {
    for (std::int64_t i = 0; i < dims; ++i) {
      out.data[r * out.stride + i] = value(r, numbers[r * dims + i]);
    }
  }
}

void decode_int8(const std::int8_t* codes, std::int64_t n_rows, std::int64_t dims,
                 const float* scales, FloatRows out) noexcept {
  widen(codes, n_rows, dims, out,
        [&](auto r, std::int8_t code) { return scales[r] * static_cast<float>(code); });
}

void decode_half(const std::uint16_t* bits, std::int64_t n_rows, std::int64_t dims,
                 FloatRows out) noexcept {
  widen(bits, n_rows, dims, out, [](auto, std::uint16_t number) { return half_to_float(number); });
}

void decode_bfloat16(const std::uint16_t* bits, std::int64_t n_rows, std::int64_t dims,
                     FloatRows out) noexcept {
  widen(bits, n_rows, dims, out,
        [](auto, std::uint16_t number) { return bfloat16_to_float(number); });
}

void dot_rows(const float* query, ConstFloatRows rows, std::int64_t n_rows, std::int64_t width,
              float* scores) noexcept {
  for (std::int64_t r = 0; r < n_rows; ++r) {
    float sum = 0;
    for (std::int64_t i = 0; i < width; ++i) sum += query[i] * rows.data[r * rows.stride + i];
    scores[r] = sum;
  }
}

float soften(float* scores, std::int64_t n, RunningSoftmax& state) noexcept {
  const float largest = std::max(state.largest, *std::max_element(scores, scores + n));
  const float shrink = std::exp(state.largest - largest);
  float total = 0;
  for (std::int64_t r = 0; r < n; ++r) {
    scores[r] = std::exp(scores[r] - largest);
    total += scores[r];
  }
  state = {largest, state.total * shrink + total};
  return shrink;
}

void add_rows(const float* weights, ConstFloatRows rows, std::int64_t n_rows, std::int64_t width,
              float shrink, float* sum) noexcept {
  for (std::int64_t i = 0; i < width; ++i) sum[i] *= shrink;
  for (std::int64_t r = 0; r < n_rows; ++r) {
    for (std::int64_t i = 0; i < width; ++i) sum[i] += weights[r] * rows.data[r * rows.stride + i];
  }
}

constexpr RowKernels kScalar = {
    "scalar",    decode_table,    decode_columns, decode_groups, decode_polar, decode_int8,
    decode_half, decode_bfloat16, dot_rows,       soften,        add_rows,
};

}  // namespace

const RowKernels& scalar_row_kernels() noexcept { return kScalar; }

}  // namespace kvpool::kernels
