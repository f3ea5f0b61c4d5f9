#include "kvpool/formats/page_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/half.h"

namespace kvpool::formats {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normal_rows(std::int64_t n, unsigned seed = 3) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(n));
  for (float& number : rows) number = normal(random);
  return rows;
}

float largest_step(const std::vector<float>& row, std::int64_t g, const PageLayout& layout) {
  const auto first = row.begin() + g * kPageGroup;
  const auto [low, high] = std::minmax_element(first, first + layout.group_size(g));
  return (*high - *low) / static_cast<float>(traits(layout.format).max_code());
}

TEST(PageLayout, bytes_are_codes_and_a_scale_and_a_minimum_a_group) {
  EXPECT_EQ((PageLayout{Format::kFp32, {2, 16, 80}}.page_bytes()), 2 * 16 * 80 * 4);
  EXPECT_EQ((PageLayout{Format::kBf16, {2, 16, 80}}.page_bytes()), 2 * 16 * 80 * 2);
  EXPECT_EQ((PageLayout{Format::kInt8, {1, 16, 80}}.page_bytes()), 16 * (80 + 2 * 4));
  EXPECT_EQ((PageLayout{Format::kInt4, {1, 16, 96}}.page_bytes()), 16 * (48 + 2 * 4));
  EXPECT_EQ((PageLayout{Format::kInt3, {1, 16, 128}}.page_bytes()), 16 * (48 + 2 * 4));
  EXPECT_EQ((PageLayout{Format::kInt2, {3, 16, 128}}.page_bytes()), 3 * 16 * (32 + 2 * 4));
  // 64-bit all the way: 4 GiB a head.
  EXPECT_EQ((PageLayout{Format::kFp32, {4, 1 << 20, 1024}}.page_bytes()), std::int64_t{1} << 34);
}

TEST(PageLayout, every_format_and_shape_reads_back_what_was_written) {
  for (const Format format : kPageFormats) {
    for (const std::int64_t block_size : {1, 2, 8, 16, 24, 64}) {
      for (const std::int64_t dim : {1, 5, 16, 33, 64, 80, 96, 128, 192, 200}) {
        const PageLayout layout{format, {2, block_size, dim}};
        std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
        const auto rows = normal_rows(2 * block_size * dim);
        for (std::int64_t h = 0; h < 2; ++h) {
          encode_tokens(layout, page.data(), h, 0, block_size, rows.data() + h * block_size * dim,
                        dim);
        }
        std::vector<float> back(rows.size(), kNan);
        for (std::int64_t h = 0; h < 2; ++h) {
          decode_tokens(layout, page.data(), h, 0, block_size, back.data() + h * block_size * dim,
                        dim);
        }
        for (std::int64_t t = 0; t < 2 * block_size; ++t) {
          const std::vector<float> row(rows.begin() + t * dim, rows.begin() + (t + 1) * dim);
          for (std::int64_t j = 0; j < dim; ++j) {
            float allowed = 0;
            if (format == Format::kFp16) allowed = std::abs(row[j]) * 0x1p-11f;
            if (format == Format::kBf16) allowed = std::abs(row[j]) * 0x1p-8f;
            // Half a step of the kept grid, which fp16 makes a little coarser.
            if (layout.coded()) {
              allowed = 0.5f * 1.01f * largest_step(row, j / kPageGroup, layout) + 2e-3f;
            }
            ASSERT_LE(std::abs(back[t * dim + j] - row[j]), allowed + 1e-7f)
                << traits(format).name << " " << block_size << " x " << dim << ", number " << j;
          }
        }
      }
    }
  }
}

TEST(PageLayout, a_token_touches_no_byte_of_another) {
  for (const Format format : kPageFormats) {
    for (const std::int64_t block_size : {1, 8, 16, 48}) {
      const PageLayout layout{format, {2, block_size, 80}};
      const auto size = static_cast<std::size_t>(layout.page_bytes());
      const auto rows = normal_rows(80);
      std::vector<int> writers(size);
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t t = 0; t < block_size; ++t) {
          std::vector<std::byte> zeros(size, std::byte{0});
          std::vector<std::byte> ones(size, std::byte{255});
          encode_tokens(layout, zeros.data(), h, t, 1, rows.data(), 80);
          encode_tokens(layout, ones.data(), h, t, 1, rows.data(), 80);
          for (std::size_t i = 0; i < size; ++i) {
            const bool written = zeros[i] != std::byte{0} || ones[i] != std::byte{255};
            writers[i] += written;
            ASSERT_TRUE(!written || zeros[i] == ones[i]);
          }
        }
      }
      EXPECT_THAT(writers, testing::Each(1)) << traits(format).name;
    }
  }
}

TEST(PageLayout, field_G3_bytes_do_not_depend_on_how_appends_are_cut) {
  const auto rows = normal_rows(16 * 96);
  for (const Format format : kPageFormats) {
    const PageLayout layout{format, {1, 16, 96}};
    const auto size = static_cast<std::size_t>(layout.page_bytes());
    std::vector<std::byte> together(size), one_by_one(size);
    encode_tokens(layout, together.data(), 0, 0, 16, rows.data(), 96);
    for (std::int64_t t = 0; t < 16; ++t) {
      encode_tokens(layout, one_by_one.data(), 0, t, 1, rows.data() + t * 96, 96);
    }
    EXPECT_EQ(together, one_by_one);
  }
}

TEST(PageLayout, field_G1_numbers_that_are_not_there_do_not_widen_the_range) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> between(5, 7);
  std::vector<float> row(96);
  for (float& number : row) number = between(random);
  for (const std::size_t group : {std::size_t{0}, std::size_t{64}}) {
    row[group] = 5;
    row[group + 1] = 7;
  }
  const PageLayout layout{Format::kInt4, {1, 16, 96}};
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
  encode_tokens(layout, page.data(), 0, 3, 1, row.data(), 96);
  for (std::int64_t g = 0; g < 2; ++g) {
    std::uint16_t scale;
    std::memcpy(&scale, page.data() + layout.scales_offset() + (g * 16 + 3) * 2, 2);
    EXPECT_NEAR(half_to_float(scale), 2.0 / 15, 1e-4);
  }
  std::vector<float> back(96);
  decode_tokens(layout, page.data(), 0, 3, 1, back.data(), 96);
  for (std::size_t j = 0; j < 96; ++j) EXPECT_LE(std::abs(back[j] - row[j]), 0.0667f);
}

TEST(PageLayout, field_G2_a_head_dim_that_64_does_not_divide_has_a_shorter_last_group) {
  // The last 32 numbers are small: a group of their own keeps them fine.
  std::vector<float> row = normal_rows(96);
  for (std::size_t j = 0; j < 64; ++j) row[j] *= 1000;
  const PageLayout layout{Format::kInt8, {1, 16, 96}};
  EXPECT_EQ(layout.groups(), 2);
  EXPECT_EQ(layout.group_size(1), 32);
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
  std::vector<float> back(96);
  encode_tokens(layout, page.data(), 0, 0, 1, row.data(), 96);
  decode_tokens(layout, page.data(), 0, 0, 1, back.data(), 96);
  for (std::size_t j = 64; j < 96; ++j) EXPECT_NEAR(back[j], row[j], 0.02);
}

TEST(PageLayout, a_group_of_equal_numbers_is_exact_and_far_numbers_saturate) {
  const PageLayout layout{Format::kInt4, {1, 1, 64}};
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
  std::vector<float> back(64);
  const auto round_trip = [&](std::vector<float> row) {
    encode_tokens(layout, page.data(), 0, 0, 1, row.data(), 64);
    decode_tokens(layout, page.data(), 0, 0, 1, back.data(), 64);
  };
  for (const float number : {0.0f, -2.5f, 1024.0f, -0.0f}) {
    round_trip(std::vector<float>(64, number));
    EXPECT_THAT(back, testing::Each(number));
  }
  std::vector<float> far(64, -1e9f);
  far[7] = 1e9f;
  round_trip(far);
  for (const float number : back) EXPECT_TRUE(std::isfinite(number));
  EXPECT_GT(back[7], 60000.0f);
}

TEST(PageLayout, a_group_with_a_number_that_is_not_finite_reads_as_nan_and_no_other_does) {
  for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
    std::vector<float> row = normal_rows(80);
    row[70] = bad;
    const PageLayout layout{Format::kInt8, {1, 8, 80}};
    std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
    std::vector<float> back(80);
    encode_tokens(layout, page.data(), 0, 2, 1, row.data(), 80);
    decode_tokens(layout, page.data(), 0, 2, 1, back.data(), 80);
    for (std::size_t j = 0; j < 80; ++j) EXPECT_EQ(std::isnan(back[j]), j >= 64) << j;
  }
}

TEST(PageLayout, pages_that_cannot_be_are_refused_by_name) {
  EXPECT_NO_THROW(check_page("f", {Format::kInt2, {1, 1, 1}}));
  const auto expect_refused = [](const PageLayout& layout, const std::string& message) {
    try {
      check_page("PagedLayer", layout);
      ADD_FAILURE() << message;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(message));
    }
  };
  expect_refused({Format::kInt1, {1, 16, 64}}, "[PagedLayer] format must be one that a page can");
  expect_refused({Format::kFp16, {0, 16, 64}}, "[PagedLayer] n_heads must be >= 1, got 0");
  expect_refused({Format::kFp16, {1, -1, 64}}, "block_size must be >= 1, got -1");
  expect_refused({Format::kFp16, {1, 16, 0}}, "head_dim must be >= 1, got 0");
  const std::int64_t huge = std::int64_t{1} << 40;
  expect_refused({Format::kFp16, {1, huge, huge}}, "head_dim is too large, got 1099511627776");
}

}  // namespace
}  // namespace kvpool::formats
