#include "kvpool/base/half.h"

#include <cstddef>

namespace kvpool {
namespace {

template <auto convert, class From, class To>
void convert_all(std::span<const From> from, std::span<To> to) noexcept {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = convert(from[i]);
}

using Widen = float (*)(std::uint16_t) noexcept;
using Narrow = std::uint16_t (*)(float) noexcept;

}  // namespace

void half_to_float(std::span<const std::uint16_t> bits, std::span<float> values) noexcept {
  convert_all<static_cast<Widen>(half_to_float)>(bits, values);
}

void float_to_half(std::span<const float> values, std::span<std::uint16_t> bits) noexcept {
  convert_all<static_cast<Narrow>(float_to_half)>(values, bits);
}

void bfloat16_to_float(std::span<const std::uint16_t> bits, std::span<float> values) noexcept {
  convert_all<static_cast<Widen>(bfloat16_to_float)>(bits, values);
}

void float_to_bfloat16(std::span<const float> values, std::span<std::uint16_t> bits) noexcept {
  convert_all<static_cast<Narrow>(float_to_bfloat16)>(values, bits);
}

}  // namespace kvpool
