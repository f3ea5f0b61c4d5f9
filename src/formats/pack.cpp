#include "kvpool/formats/pack.h"

#include <algorithm>
#include <cstring>

#include "kvpool/formats/packed_group.h"

namespace kvpool::formats {
namespace {

template <int bits>
void pack(std::span<const std::uint8_t> codes, std::byte* packed) noexcept {
  using Group = PackedGroup<bits>;
  const std::size_t whole = codes.size() / Group::kNumbers;
  for (std::size_t g = 0; g < whole; ++g, packed += Group::kBytes) {
    const std::uint32_t word = Group::word_of(codes.data() + g * Group::kNumbers, Group::kNumbers);
    for (int i = 0; i < Group::kBytes; ++i) packed[i] = static_cast<std::byte>(word >> (8 * i));
  }
  const int rest = static_cast<int>(codes.size() % Group::kNumbers);
  const std::uint32_t word = Group::word_of(codes.data() + whole * Group::kNumbers, rest);
  for (int i = 0; i < (rest * bits + 7) / 8; ++i) {
    packed[i] = static_cast<std::byte>(word >> (8 * i));
  }
}

template <int bits>
void unpack(const std::byte* packed, std::span<std::uint8_t> codes) noexcept {
  using Group = PackedGroup<bits>;
  const auto word_at = [](const std::byte* bytes, int n) {
    std::uint32_t word = 0;
    for (int i = 0; i < n; ++i) word |= static_cast<std::uint32_t>(bytes[i]) << (8 * i);
    return word;
  };
  const std::size_t whole = codes.size() / Group::kNumbers;
  std::uint8_t* out = codes.data();
  for (std::size_t g = 0; g < whole; ++g, packed += Group::kBytes, out += Group::kNumbers) {
    const std::uint32_t word = word_at(packed, Group::kBytes);
    for (int j = 0; j < Group::kNumbers; ++j) out[j] = Group::code_at(word, j);
  }
  const int rest = static_cast<int>(codes.size() % Group::kNumbers);
  const std::uint32_t word = word_at(packed, (rest * bits + 7) / 8);
  for (int j = 0; j < rest; ++j) out[j] = Group::code_at(word, j);
}

}  // namespace

std::optional<std::size_t> first_bad_code(Format format,
                                          std::span<const std::uint8_t> codes) noexcept {
  const std::uint32_t max_code = traits(format).max_code();
  // A plain maximum vectorises; the search runs only when there is something to find.
  std::uint8_t largest = 0;
  for (const std::uint8_t code : codes) largest = std::max(largest, code);
  if (largest <= max_code) return std::nullopt;
  const auto bad = std::ranges::find_if(codes, [&](std::uint8_t code) { return code > max_code; });
  return static_cast<std::size_t>(bad - codes.begin());
}

void pack_row(Format format, std::span<const std::uint8_t> codes,
              std::span<std::byte> packed) noexcept {
  switch (traits(format).bits) {
    case 1:
      return pack<1>(codes, packed.data());
    case 2:
      return pack<2>(codes, packed.data());
    case 3:
      return pack<3>(codes, packed.data());
    case 4:
      return pack<4>(codes, packed.data());
    default:
      if (!codes.empty()) std::memcpy(packed.data(), codes.data(), codes.size());
  }
}

void unpack_row(Format format, std::span<const std::byte> packed,
                std::span<std::uint8_t> codes) noexcept {
  switch (traits(format).bits) {
    case 1:
      return unpack<1>(packed.data(), codes);
    case 2:
      return unpack<2>(packed.data(), codes);
    case 3:
      return unpack<3>(packed.data(), codes);
    case 4:
      return unpack<4>(packed.data(), codes);
    default:
      if (!codes.empty()) std::memcpy(codes.data(), packed.data(), codes.size());
  }
}

}  // namespace kvpool::formats
