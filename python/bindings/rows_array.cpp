#include "rows_array.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kvpool/base/half.h"
#include "kvpool/formats/pack.h"
#include "kvpool/formats/rows.h"

namespace nb = nanobind;

namespace kvpool::bindings {
namespace {

using formats::Format;

using Widen = void (*)(const std::byte* numbers, std::span<float> row);

template <class T>
void widen(const std::byte* numbers, std::span<float> row) {
  const T* typed = reinterpret_cast<const T*>(numbers);
  std::transform(typed, typed + row.size(), row.begin(),
                 [](T number) { return static_cast<float>(number); });
}

void widen_half(const std::byte* numbers, std::span<float> row) {
  half_to_float({reinterpret_cast<const std::uint16_t*>(numbers), row.size()}, row);
}

void widen_bfloat16(const std::byte* numbers, std::span<float> row) {
  bfloat16_to_float({reinterpret_cast<const std::uint16_t*>(numbers), row.size()}, row);
}

Widen widen_from(nb::dlpack::dtype dtype, bool bfloat16) {
  using Code = nb::dlpack::dtype_code;
  if (dtype.lanes != 1) return nullptr;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Float:
      if (dtype.bits == 16) return widen_half;
      if (dtype.bits == 32) return widen<float>;
      if (dtype.bits == 64) return widen<double>;
      return nullptr;
    case Code::Int:
      if (dtype.bits == 8) return widen<std::int8_t>;
      if (dtype.bits == 16) return widen<std::int16_t>;
      if (dtype.bits == 32) return widen<std::int32_t>;
      if (dtype.bits == 64) return widen<std::int64_t>;
      return nullptr;
    case Code::UInt:
      if (dtype.bits == 8) return widen<std::uint8_t>;
      if (dtype.bits == 16) return bfloat16 ? widen_bfloat16 : widen<std::uint16_t>;
      if (dtype.bits == 32) return widen<std::uint32_t>;
      if (dtype.bits == 64) return widen<std::uint64_t>;
      return nullptr;
    default:
      return nullptr;
  }
}

// The array's numbers lie as the format keeps them: nothing to convert.
bool same_numbers(Format format, nb::dlpack::dtype dtype, bool bfloat16) {
  switch (format) {
    case Format::kFp32:
      return dtype == nb::dtype<float>();
    case Format::kFp16:
      return dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) &&
             dtype.bits == 16 && dtype.lanes == 1;
    case Format::kBf16:
      return bfloat16 && dtype == nb::dtype<std::uint16_t>();
    default:
      return false;
  }
}

nb::dlpack::dtype stored_dtype(Format format) {
  switch (format) {
    case Format::kFp32:
      return nb::dtype<float>();
    case Format::kFp16:
      return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case Format::kBf16:
      return nb::dtype<std::uint16_t>();
    default:
      return nb::dtype<std::uint8_t>();
  }
}

[[noreturn]] void refuse_number(const char* call, Format format, float number, std::size_t row,
                                std::size_t column) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(number));
  const formats::FormatTraits& traits = formats::traits(format);
  const std::string message = "[" + std::string(call) + "] values of format '" +
                              std::string(traits.name) + "' must be codes in 0.." +
                              std::to_string(traits.max_code()) + ", got " + text + " at [" +
                              std::to_string(row) + ", " + std::to_string(column) + "]";
  throw nb::value_error(message.c_str());
}

}  // namespace

std::vector<std::byte> encode_rows(const char* call, Format format, const RowsArray& values,
                                   bool bfloat16) {
  const std::size_t n_rows = values.shape(0);
  const std::size_t width = values.shape(1);
  const std::size_t row_bytes = formats::row_bytes(format, width);
  std::vector<std::byte> encoded(n_rows * row_bytes);
  const Widen widen_row = widen_from(values.dtype(), bfloat16);
  if (widen_row == nullptr) {
    throw nb::type_error(("[" + std::string(call) + "] values must be real numbers").c_str());
  }
  const auto* numbers = static_cast<const std::byte*>(values.data());
  if (encoded.empty()) return encoded;
  if (same_numbers(format, values.dtype(), bfloat16)) {
    std::memcpy(encoded.data(), numbers, encoded.size());
    return encoded;
  }
  const bool codes = formats::traits(format).kind == formats::Kind::kCode &&
                     values.dtype() == nb::dtype<std::uint8_t>();
  const std::size_t number_bytes = values.dtype().bits / 8;
  std::vector<float> wide(width);
  for (std::size_t i = 0; i < n_rows; ++i) {
    const std::byte* row = numbers + i * width * number_bytes;
    const auto out = std::span(encoded).subspan(i * row_bytes, row_bytes);
    std::optional<std::size_t> bad;
    if (codes) {
      const std::span given{reinterpret_cast<const std::uint8_t*>(row), width};
      bad = formats::first_bad_code(format, given);
      if (!bad) formats::pack_row(format, given, out);
    } else {
      widen_row(row, wide);
      bad = formats::encode_row(format, wide, out);
    }
    if (!bad) continue;
    widen_row(row, wide);
    refuse_number(call, format, wide[*bad], i, *bad);
  }
  return encoded;
}

nb::object rows_to_numpy(Format format, const std::vector<std::byte>& bytes, std::int64_t n_rows,
                         std::int64_t width) {
  const auto n = static_cast<std::size_t>(n_rows);
  const auto columns = static_cast<std::size_t>(width);
  const bool codes = formats::traits(format).kind == formats::Kind::kCode;
  auto memory = std::make_unique<std::byte[]>(codes ? n * columns : bytes.size());
  if (codes) {
    const std::size_t row_bytes = formats::row_bytes(format, columns);
    for (std::size_t i = 0; i < n; ++i) {
      formats::unpack_row(format, std::span(bytes).subspan(i * row_bytes, row_bytes),
                          {reinterpret_cast<std::uint8_t*>(memory.get()) + i * columns, columns});
    }
  } else if (!bytes.empty()) {
    std::memcpy(memory.get(), bytes.data(), bytes.size());
  }
  std::byte* data = memory.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::byte*>(p); });
  memory.release();
  return nb::cast(nb::ndarray<nb::numpy>(data, {n, columns}, owner, {}, stored_dtype(format)));
}

}  // namespace kvpool::bindings
