#include "kvpool/formats/pack.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace kvpool::formats {
namespace {

using Codes = std::vector<std::uint8_t>;

std::vector<std::byte> packed(Format format, const Codes& codes) {
  std::vector<std::byte> out(row_bytes(format, codes.size()), std::byte{0xff});
  pack_row(format, codes, out);
  return out;
}

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int value : values) out.push_back(static_cast<std::byte>(value));
  return out;
}

TEST(Pack, codes_lie_little_endian_in_the_byte) {
  EXPECT_EQ(packed(Format::kInt1, {1, 0, 1, 1, 0, 0, 0, 1}), bytes({0b1000'1101}));
  EXPECT_EQ(packed(Format::kInt2, {1, 2, 3, 0}), bytes({0b00'11'10'01}));
  EXPECT_EQ(packed(Format::kInt4, {0x1, 0xa}), bytes({0xa1}));
  EXPECT_EQ(packed(Format::kInt8, {0, 255}), bytes({0, 255}));
}

TEST(Pack, eight_3_bit_codes_are_one_24_bit_word) {
  // 1 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12 | 6 << 15 | 7 << 18 | 0 << 21
  EXPECT_EQ(packed(Format::kInt3, {1, 2, 3, 4, 5, 6, 7, 0}), bytes({0xd1, 0x58, 0x1f}));
}

TEST(Pack, a_cut_group_is_filled_up_with_zero_bits) {
  EXPECT_EQ(packed(Format::kInt4, {0xf, 0xf, 0xf}), bytes({0xff, 0x0f}));
  EXPECT_EQ(packed(Format::kInt3, {7}), bytes({0x07}));
  EXPECT_EQ(packed(Format::kInt3, {7, 7, 7}), bytes({0xff, 0x01}));
  EXPECT_EQ(packed(Format::kInt1, {1, 1, 1}), bytes({0x07}));
}

TEST(Pack, the_first_code_out_of_range_is_named) {
  EXPECT_EQ(first_bad_code(Format::kInt4, Codes{0, 15, 16, 200}), 2u);
  EXPECT_EQ(first_bad_code(Format::kInt1, Codes{2}), 0u);
  EXPECT_EQ(first_bad_code(Format::kInt8, Codes{255}), std::nullopt);
  EXPECT_EQ(first_bad_code(Format::kInt3, Codes{}), std::nullopt);
}

TEST(Pack, unpacking_returns_the_codes_at_every_width) {
  std::mt19937 random(2);
  for (const FormatTraits& entry : kFormats) {
    if (entry.kind != Kind::kCode) continue;
    for (std::size_t width = 0; width < 300; ++width) {
      Codes codes(width);
      for (auto& code : codes) code = static_cast<std::uint8_t>(random() % (entry.max_code() + 1));
      ASSERT_EQ(first_bad_code(entry.format, codes), std::nullopt);
      Codes again(width);
      unpack_row(entry.format, packed(entry.format, codes), again);
      ASSERT_EQ(again, codes) << entry.name << " " << width;
    }
  }
}

}  // namespace
}  // namespace kvpool::formats
