#include "kvpool/formats/rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kvpool/base/half.h"
#include "kvpool/formats/pack.h"

namespace kvpool::formats {
namespace {

// Codes pass through a buffer on the stack in runs of whole groups of every format.
constexpr std::size_t kRun = 256;

template <class T, auto convert>
void store(std::span<const float> values, std::byte* row) noexcept {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T bits = convert(values[i]);
    std::memcpy(row + i * sizeof(T), &bits, sizeof(T));
  }
}

template <class T, auto convert>
void load(const std::byte* row, std::span<float> values) noexcept {
  for (std::size_t i = 0; i < values.size(); ++i) {
    T bits;
    std::memcpy(&bits, row + i * sizeof(T), sizeof(T));
    values[i] = convert(bits);
  }
}

constexpr auto kHalf = [](float value) { return float_to_half(value); };
constexpr auto kBfloat16 = [](float value) { return float_to_bfloat16(value); };
constexpr auto kFromHalf = [](std::uint16_t bits) { return half_to_float(bits); };
constexpr auto kFromBfloat16 = [](std::uint16_t bits) { return bfloat16_to_float(bits); };

std::optional<std::size_t> encode_codes(Format format, std::span<const float> values,
                                        std::span<std::byte> row) noexcept {
  const float end = static_cast<float>(traits(format).max_code()) + 1;
  std::array<std::uint8_t, kRun> codes;
  for (std::size_t start = 0; start < values.size(); start += kRun) {
    const std::size_t n = std::min(kRun, values.size() - start);
    for (std::size_t i = 0; i < n; ++i) {
      const float value = values[start + i];
      if (!(value > -1 && value < end)) return start + i;
      codes[i] = static_cast<std::uint8_t>(value);
    }
    pack_row(format, std::span(codes).first(n),
             row.subspan(row_bytes(format, start), row_bytes(format, n)));
  }
  return std::nullopt;
}

void decode_codes(Format format, std::span<const std::byte> row, std::span<float> values) noexcept {
  std::array<std::uint8_t, kRun> codes;
  for (std::size_t start = 0; start < values.size(); start += kRun) {
    const std::size_t n = std::min(kRun, values.size() - start);
    unpack_row(format, row.subspan(row_bytes(format, start)), std::span(codes).first(n));
    std::copy_n(codes.begin(), n, values.begin() + static_cast<std::ptrdiff_t>(start));
  }
}

}  // namespace

std::optional<std::size_t> encode_row(Format format, std::span<const float> values,
                                      std::span<std::byte> row) noexcept {
  if (values.empty()) return std::nullopt;
  switch (format) {
    case Format::kFp32:
      std::memcpy(row.data(), values.data(), values.size_bytes());
      break;
    case Format::kFp16:
      store<std::uint16_t, kHalf>(values, row.data());
      break;
    case Format::kBf16:
      store<std::uint16_t, kBfloat16>(values, row.data());
      break;
    default:
      return encode_codes(format, values, row);
  }
  return std::nullopt;
}

void decode_row(Format format, std::span<const std::byte> row, std::span<float> values) noexcept {
  if (values.empty()) return;
  switch (format) {
    case Format::kFp32:
      std::memcpy(values.data(), row.data(), values.size_bytes());
      break;
    case Format::kFp16:
      return load<std::uint16_t, kFromHalf>(row.data(), values);
    case Format::kBf16:
      return load<std::uint16_t, kFromBfloat16>(row.data(), values);
    default:
      return decode_codes(format, row, values);
  }
}

}  // namespace kvpool::formats
