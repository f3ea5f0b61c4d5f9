#include "kvpool/formats/format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvpool::formats {
namespace {

TEST(Format, the_table_is_indexed_by_its_own_entries) {
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(kFormats[i].format), i) << kFormats[i].name;
    EXPECT_EQ(format_from_name(kFormats[i].name), kFormats[i].format);
  }
}

TEST(Format, groups_fill_whole_bytes) {
  for (const FormatTraits& entry : kFormats) {
    EXPECT_EQ(entry.bits * entry.group_numbers, 8 * entry.group_bytes) << entry.name;
  }
}

TEST(Format, names_are_exact) {
  for (const char* name : {"FP16", "float16", "", "int5", "fp16 "}) {
    EXPECT_EQ(format_from_name(name), std::nullopt) << name;
  }
  EXPECT_EQ(format_names(), "fp32, fp16, bf16, int8, int4, int3, int2, int1");
}

TEST(Format, code_formats_hold_unsigned_codes_of_their_width) {
  EXPECT_EQ(traits(Format::kInt8).max_code(), 255u);
  EXPECT_EQ(traits(Format::kInt4).max_code(), 15u);
  EXPECT_EQ(traits(Format::kInt3).max_code(), 7u);
  EXPECT_EQ(traits(Format::kInt2).max_code(), 3u);
  EXPECT_EQ(traits(Format::kInt1).max_code(), 1u);
}

TEST(Format, rows_are_padded_to_whole_bytes) {
  EXPECT_EQ(row_bytes(Format::kFp32, 5), 20u);
  EXPECT_EQ(row_bytes(Format::kBf16, 5), 10u);
  EXPECT_EQ(row_bytes(Format::kInt8, 5), 5u);
  EXPECT_EQ(row_bytes(Format::kInt4, 5), 3u);
  EXPECT_EQ(row_bytes(Format::kInt3, 8), 3u);
  EXPECT_EQ(row_bytes(Format::kInt3, 9), 4u);
  EXPECT_EQ(row_bytes(Format::kInt2, 5), 2u);
  EXPECT_EQ(row_bytes(Format::kInt1, 128), 16u);
}

TEST(Format, representation_is_equal_only_for_the_same_layout_and_kind) {
  for (const FormatTraits& a : kFormats) {
    for (const FormatTraits& b : kFormats) {
      EXPECT_EQ(same_representation(a.format, b.format), a.format == b.format)
          << a.name << " " << b.name;
    }
  }
}

}  // namespace
}  // namespace kvpool::formats
