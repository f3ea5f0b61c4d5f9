#include "kvpool/formats/rows.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace kvpool::formats {
namespace {

std::vector<float> through(Format format, const std::vector<float>& values) {
  std::vector<std::byte> row(row_bytes(format, values.size()));
  EXPECT_EQ(encode_row(format, values, row), std::nullopt);
  std::vector<float> out(values.size());
  decode_row(format, row, out);
  return out;
}

std::optional<std::size_t> bad(Format format, const std::vector<float>& values) {
  std::vector<std::byte> row(row_bytes(format, values.size()));
  return encode_row(format, values, row);
}

TEST(Rows, codes_of_every_width_survive) {
  std::mt19937 random(1);
  for (const FormatTraits& entry : kFormats) {
    if (entry.kind != Kind::kCode) continue;
    for (const std::size_t width : {1u, 7u, 128u, 255u, 256u, 257u, 600u}) {
      std::vector<float> values(width);
      for (float& value : values) value = static_cast<float>(random() % (entry.max_code() + 1));
      EXPECT_EQ(through(entry.format, values), values) << entry.name << " " << width;
    }
  }
}

TEST(Rows, float_formats_round_to_nearest_even) {
  EXPECT_EQ(through(Format::kFp32, {0.1f, -3e38f}), (std::vector<float>{0.1f, -3e38f}));
  EXPECT_EQ(through(Format::kFp16, {2049.0f, 2051.0f}), (std::vector<float>{2048.0f, 2052.0f}));
  EXPECT_EQ(through(Format::kBf16, {257.0f, 259.0f}), (std::vector<float>{256.0f, 260.0f}));
}

TEST(Rows, code_formats_drop_the_fraction) {
  EXPECT_EQ(through(Format::kInt8, {17.7f, 255.9f, -0.5f}), (std::vector<float>{17, 255, 0}));
}

TEST(Rows, fault_F20_a_number_that_is_no_code_is_named) {
  EXPECT_EQ(bad(Format::kInt8, {0, 256}), 1u);
  EXPECT_EQ(bad(Format::kInt8, {-1}), 0u);
  EXPECT_EQ(bad(Format::kInt4, {15, 16}), 1u);
  EXPECT_EQ(bad(Format::kInt1, {0, 1, 2}), 2u);
  EXPECT_EQ(bad(Format::kInt2, {std::numeric_limits<float>::quiet_NaN()}), 0u);
  EXPECT_EQ(bad(Format::kInt3, {std::numeric_limits<float>::infinity()}), 0u);
  std::vector<float> late(600, 0.0f);
  late[599] = 99;
  EXPECT_EQ(bad(Format::kInt4, late), 599u);
}

}  // namespace
}  // namespace kvpool::formats
