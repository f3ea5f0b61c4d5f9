#include "kvpool/kernels/page_append.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kvpool/formats/rows.h"

namespace kvpool::kernels {

void PrintTo(const PageKernels& kernels, std::ostream* out) { *out << kernels.target; }

namespace {

using formats::Format;
using formats::PageLayout;

constexpr Format kFloats[] = {Format::kFp32, Format::kFp16, Format::kBf16};
constexpr std::int64_t kHeads = 2;

std::vector<std::byte> empty_page(const PageLayout& layout) {
  return std::vector<std::byte>(static_cast<std::size_t>(layout.page_bytes()), std::byte{0xff});
}

/// [kHeads, tokens, dim] random rows with gaps between them, in any float format.
struct Rows {
  std::vector<float> numbers;  // as they are after rounding to the format
  std::vector<std::byte> bytes;
  Format format;
  std::int64_t dim, head_stride, token_stride;

  Rows(Format f, std::int64_t tokens, std::int64_t width, unsigned seed = 11)
      : format(f), dim(width), head_stride(tokens * (width + 3) + 5), token_stride(width + 3) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    numbers.resize(static_cast<std::size_t>(kHeads * head_stride));
    for (float& number : numbers) number = 3 + normal(random);
    bytes.resize(formats::row_bytes(format, numbers.size()));
    EXPECT_EQ(formats::encode_row(format, numbers, bytes), std::nullopt);
    formats::decode_row(format, bytes, numbers);
  }

  SourceRows source() const { return {bytes.data(), format, head_stride, token_stride}; }
  TargetRows target() { return {bytes.data(), format, head_stride, token_stride}; }
  const float* row(std::int64_t h, std::int64_t t) const {
    return numbers.data() + h * head_stride + t * token_stride;
  }
};

class PageAppend : public testing::TestWithParam<PageKernels> {
 protected:
  template <class Check>
  void for_each_shape(Check check) {
    for (const Format format : formats::kPageFormats) {
      for (const std::int64_t block_size : {1, 8, 16, 32}) {
        for (const std::int64_t dim : {3, 64, 80, 96, 128}) {
          SCOPED_TRACE(std::string(formats::traits(format).name) + ", block size " +
                       std::to_string(block_size) + ", head_dim " + std::to_string(dim));
          check(PageLayout{format, {kHeads, block_size, dim}});
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  static std::vector<std::byte> expected_page(const PageLayout& layout, const Rows& rows,
                                              std::int64_t first, std::int64_t count) {
    std::vector<std::byte> page = empty_page(layout);
    for (std::int64_t h = 0; h < kHeads; ++h) {
      formats::encode_tokens(layout, page.data(), h, first, count, rows.row(h, 0),
                             rows.token_stride);
    }
    return page;
  }
};

TEST_P(PageAppend, append_writes_the_bytes_of_encode_tokens) {
  for_each_shape([](const PageLayout& layout) {
    for (const Format source : kFloats) {
      for (const std::int64_t first : {std::int64_t{0}, layout.shape.block_size / 2}) {
        const std::int64_t count = layout.shape.block_size - first;
        const Rows rows(source, count, layout.shape.head_dim);
        std::vector<std::byte> page = empty_page(layout);
        GetParam().append_rows(layout, page.data(), first, count, rows.source());
        ASSERT_EQ(page, expected_page(layout, rows, first, count));
      }
    }
  });
}

TEST_P(PageAppend, zeros_of_both_signs_and_the_ends_of_fp32_make_the_same_codes_everywhere) {
  constexpr float kEnd = std::numeric_limits<float>::max();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  for (const std::vector<float>& row : std::vector<std::vector<float>>{{0.0f, -0.0f},
                                                                       {-0.0f, 0.0f},
                                                                       {-0.0f, -0.0f},
                                                                       {-kTiny, kTiny},
                                                                       {-kEnd, kEnd},
                                                                       {-kEnd, -7e4f},
                                                                       {6.6e4f, kEnd}}) {
    for (const Format format : {Format::kInt8, Format::kInt4, Format::kInt3, Format::kInt2}) {
      const PageLayout layout{format, {1, 1, 2}};
      std::vector<std::byte> expected = empty_page(layout);
      formats::encode_tokens(layout, expected.data(), 0, 0, 1, row.data(), 2);
      std::vector<std::byte> page = empty_page(layout);
      GetParam().append_rows(layout, page.data(), 0, 1,
                             {reinterpret_cast<const std::byte*>(row.data()), Format::kFp32, 2, 2});
      EXPECT_EQ(page, expected) << row[0] << ", " << row[1];
    }
  }
}

TEST_P(PageAppend, rows_of_the_pages_own_format_are_copied_bit_for_bit) {
  // Bits that no conversion keeps: a signalling NaN with a payload.
  const std::vector<std::uint16_t> row(128, 0x7d55);
  for (const Format format : {Format::kFp16, Format::kBf16}) {
    const PageLayout layout{format, {1, 16, 128}};
    std::vector<std::byte> page = empty_page(layout);
    GetParam().append_rows(layout, page.data(), 4, 1,
                           {reinterpret_cast<const std::byte*>(row.data()), format, 128, 128});
    EXPECT_EQ(std::memcmp(page.data() + 4 * 256, row.data(), 256), 0);
  }
}

TEST_P(PageAppend, gather_reads_what_decode_tokens_reads) {
  for_each_shape([](const PageLayout& layout) {
    const std::int64_t count = layout.shape.block_size;
    const std::int64_t dim = layout.shape.head_dim;
    const Rows rows(Format::kFp32, count, dim);
    const std::vector<std::byte> page = expected_page(layout, rows, 0, count);
    for (const Format format : kFloats) {
      for (const std::int64_t first : {std::int64_t{0}, count / 2}) {
        Rows out(format, count, dim, 12);
        const std::vector<std::byte> before = out.bytes;
        GetParam().gather_rows(layout, page.data(), first, count - first, out.target());
        std::vector<std::byte> expected = before;
        std::vector<float> row(static_cast<std::size_t>(dim));
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t t = first; t < count; ++t) {
            formats::decode_tokens(layout, page.data(), h, t, 1, row.data(), dim);
            const std::size_t at =
                static_cast<std::size_t>(h * out.head_stride + (t - first) * out.token_stride);
            ASSERT_EQ(formats::encode_row(
                          format, row, std::span(expected).subspan(formats::row_bytes(format, at))),
                      std::nullopt);
          }
        }
        ASSERT_EQ(out.bytes, expected);  // the gaps between rows included
      }
    }
  });
}

TEST_P(PageAppend, decode_head_gives_the_bits_of_decode_tokens) {
  for_each_shape([](const PageLayout& layout) {
    const std::int64_t count = layout.shape.block_size;
    const std::int64_t dim = layout.shape.head_dim;
    const Rows rows(Format::kFp32, count, dim);
    const std::vector<std::byte> page = expected_page(layout, rows, 0, count);
    for (const std::int64_t first : {std::int64_t{0}, count / 3}) {
      std::vector<float> expected(static_cast<std::size_t>(count * (dim + 1)), -1.0f);
      std::vector<float> out = expected;
      formats::decode_tokens(layout, page.data(), 1, first, count - first, expected.data(),
                             dim + 1);
      GetParam().decode_head(layout, page.data(), 1, first, count - first, out.data(), dim + 1);
      ASSERT_EQ(out, expected);
    }
  });
}

TEST_P(PageAppend, convert_gives_the_bytes_of_decoding_and_encoding) {
  for_each_shape([](const PageLayout& from) {
    const std::int64_t dim = from.shape.head_dim;
    const Rows rows(Format::kFp32, from.shape.block_size, dim);
    const std::vector<std::byte> page = expected_page(from, rows, 0, from.shape.block_size);
    for (const Format format : formats::kPageFormats) {
      if (format == from.format) continue;
      const PageLayout to{format, from.shape};
      for (const std::int64_t n : {std::int64_t{1}, from.shape.block_size}) {
        std::vector<std::byte> expected = empty_page(to);
        std::vector<float> row(static_cast<std::size_t>(dim));
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t t = 0; t < n; ++t) {
            formats::decode_tokens(from, page.data(), h, t, 1, row.data(), dim);
            formats::encode_tokens(to, expected.data(), h, t, 1, row.data(), dim);
          }
        }
        std::vector<std::byte> out = empty_page(to);
        GetParam().convert_page(from, page.data(), to, out.data(), n);
        ASSERT_EQ(out, expected) << "to " << formats::traits(format).name << ", " << n << " tokens";
      }
    }
  });
}

TEST_P(PageAppend, converting_to_the_same_format_copies) {
  for_each_shape([](const PageLayout& layout) {
    const Rows rows(Format::kFp32, layout.shape.block_size, layout.shape.head_dim);
    const std::vector<std::byte> page = expected_page(layout, rows, 0, layout.shape.block_size);
    std::vector<std::byte> out = empty_page(layout);
    GetParam().convert_page(layout, page.data(), layout, out.data(), layout.shape.block_size);
    ASSERT_EQ(out, page);
  });
}

TEST_P(PageAppend, field_G12_a_page_used_again_in_a_smaller_format_is_that_formats) {
  const PageLayout wide{Format::kFp16, {kHeads, 16, 64}};
  const PageLayout narrow{Format::kInt4, {kHeads, 16, 64}};
  const Rows rows(Format::kFp16, 16, 64);
  std::vector<std::byte> slot = empty_page(wide);
  GetParam().append_rows(wide, slot.data(), 0, 16, rows.source());
  const std::vector<std::byte> before = slot;
  GetParam().append_rows(narrow, slot.data(), 0, 16, rows.source());
  const auto size = static_cast<std::size_t>(narrow.page_bytes());
  EXPECT_EQ(std::memcmp(slot.data(), expected_page(narrow, rows, 0, 16).data(), size), 0);
  EXPECT_EQ(std::memcmp(slot.data() + size, before.data() + size, slot.size() - size), 0);
}

INSTANTIATE_TEST_SUITE_P(EachTarget, PageAppend, testing::ValuesIn(all_page_kernels()),
                         [](const auto& test) { return std::string(test.param.target); });

}  // namespace
}  // namespace kvpool::kernels
