#include "kvpool/kernels/row_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kvpool/base/half.h"

namespace kvpool::kernels {

void PrintTo(const RowKernels& kernels, std::ostream* out) { *out << kernels.target; }

namespace {

// Sums of some hundred fp32 terms of size one in another order, and exp within two units.
constexpr float kTolerance = 2e-5f;

/// Every kernel against the scalar one, for each kind of instructions of this machine.
class RowKernelsTest : public testing::TestWithParam<RowKernels> {
 protected:
  const RowKernels& tested = GetParam();
  const RowKernels& oracle = scalar_row_kernels();
  std::mt19937 random{11};

  std::vector<float> normal(std::size_t n) {
    std::normal_distribution<float> distribution;
    std::vector<float> out(n);
    for (float& value : out) value = distribution(random);
    return out;
  }

  /// Rows of any bits: the buffer ends right after the last row, so an access past it is caught.
  std::vector<std::byte> packed(std::int64_t n_rows, std::int64_t row_bytes) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(n_rows * row_bytes));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
    bytes.shrink_to_fit();
    return bytes;
  }

  static void expect_near(const std::vector<float>& got, const std::vector<float>& want,
                          std::int64_t n_rows, std::int64_t stride, std::int64_t n,
                          const std::string& what) {
    for (std::int64_t r = 0; r < n_rows; ++r) {
      for (std::int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(r * stride + i);
        ASSERT_NEAR(got[at], want[at], kTolerance * (1 + std::abs(want[at])))
            << what << ", row " << r << ", column " << i;
      }
    }
  }

  /// Runs `decode(kernels, rows, out)` with both for every width and for row lengths that fill
  /// vectors and that do not.
  template <class Decode>
  void compare_for_all_widths(Decode decode, std::int64_t multiple = 1) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (std::int64_t n : {8, 16, 20, 24, 50, 64, 80, 128, 131}) {
        if (n % multiple != 0) continue;
        const std::int64_t row_bytes = (n * bits + 7) / 8;
        const std::int64_t n_rows = 5;
        const std::int64_t stride = padded_row(2 * n) + kRowPadding;
        const auto bytes = packed(n_rows, row_bytes);
        const CodeRows rows{bytes.data(), bytes.data() + bytes.size(), row_bytes, n_rows, n, bits};
        std::vector<float> got(static_cast<std::size_t>(n_rows * stride), -7);
        std::vector<float> want = got;
        decode(tested, rows, FloatRows{got.data(), stride});
        decode(oracle, rows, FloatRows{want.data(), stride});
        expect_near(got, want, n_rows, stride, n,
                    std::to_string(bits) + " bits, " + std::to_string(n) + " codes");
      }
    }
  }
};

TEST_P(RowKernelsTest, decode_table_matches_the_scalar_kernel) {
  const auto table = normal(256);
  const auto scales = normal(5);
  compare_for_all_widths([&](const RowKernels& kernels, const CodeRows& rows, FloatRows out) {
    kernels.decode_table(rows, table.data(), scales.data(), out);
  });
}

TEST_P(RowKernelsTest, decode_columns_matches_the_scalar_kernel) {
  const auto step = normal(144);
  const auto zero = normal(144);
  compare_for_all_widths([&](const RowKernels& kernels, const CodeRows& rows, FloatRows out) {
    kernels.decode_columns(rows, step.data(), zero.data(), out);
  });
}

TEST_P(RowKernelsTest, decode_groups_matches_the_scalar_kernel) {
  const auto step = normal(5 * 16);
  const auto zero = normal(5 * 16);
  for (const std::int64_t group : {8, 16, 32, 64}) {
    compare_for_all_widths(
        [&](const RowKernels& kernels, const CodeRows& rows, FloatRows out) {
          kernels.decode_groups(rows, group, step.data(), zero.data(), out);
        },
        group);
  }
}

TEST_P(RowKernelsTest, decode_polar_matches_the_scalar_kernel) {
  const auto cosine = normal(256);
  const auto sine = normal(256);
  const std::int64_t in_stride = 144;
  const auto in = normal(5 * 144);
  compare_for_all_widths([&](const RowKernels& kernels, const CodeRows& rows, FloatRows out) {
    kernels.decode_polar(rows, cosine.data(), sine.data(), {in.data(), in_stride}, out);
    // Both halves, moved to where the comparison looks.
    for (std::int64_t r = 0; r < rows.n_rows; ++r) {
      float* row = out.data + r * out.stride;
      for (std::int64_t i = 0; i < rows.n_codes; ++i) row[i] += 3 * row[rows.n_codes + i];
    }
  });
}

TEST_P(RowKernelsTest, whole_numbers_and_halves_widen_exactly) {
  for (const std::int64_t dims : {1, 15, 64, 100, 128}) {
    const std::int64_t n_rows = 3;
    const std::int64_t stride = padded_row(dims);
    const auto n = static_cast<std::size_t>(n_rows * dims);
    std::vector<std::int8_t> codes(n);
    std::vector<std::uint16_t> halves(n), bfloats(n);
    const auto numbers = normal(n);
    for (std::size_t i = 0; i < n; ++i) {
      codes[i] = static_cast<std::int8_t>(random());
      halves[i] = float_to_half(numbers[i] * (i % 7 == 0 ? 1e-6f : 1.0f));
      bfloats[i] = float_to_bfloat16(numbers[i]);
    }
    const std::vector<float> scales = {1, 0.5f, -3};
    std::vector<float> got(static_cast<std::size_t>(n_rows * stride)), want = got;
    tested.decode_int8(codes.data(), n_rows, dims, scales.data(), {got.data(), stride});
    oracle.decode_int8(codes.data(), n_rows, dims, scales.data(), {want.data(), stride});
    EXPECT_EQ(got, want);
    tested.decode_half(halves.data(), n_rows, dims, {got.data(), stride});
    oracle.decode_half(halves.data(), n_rows, dims, {want.data(), stride});
    EXPECT_EQ(got, want);
    tested.decode_bfloat16(bfloats.data(), n_rows, dims, {got.data(), stride});
    oracle.decode_bfloat16(bfloats.data(), n_rows, dims, {want.data(), stride});
    EXPECT_EQ(got, want);
  }
}

TEST_P(RowKernelsTest, dot_rows_and_add_rows_match_the_scalar_kernels) {
  for (const std::int64_t width : {16, 48, 64, 80, 128, 272}) {
    for (const std::int64_t n_rows : {1, 3, 4, 7, 16}) {
      const std::int64_t stride = width + 16;
      const auto rows = normal(static_cast<std::size_t>(n_rows * stride));
      const auto query = normal(static_cast<std::size_t>(width));
      const auto weights = normal(static_cast<std::size_t>(n_rows));
      std::vector<float> got(static_cast<std::size_t>(n_rows)), want = got;
      tested.dot_rows(query.data(), {rows.data(), stride}, n_rows, width, got.data());
      oracle.dot_rows(query.data(), {rows.data(), stride}, n_rows, width, want.data());
      expect_near(got, want, 1, 0, n_rows, "scores");
      std::vector<float> sum = query, expected = query;
      tested.add_rows(weights.data(), {rows.data(), stride}, n_rows, width, 0.25f, sum.data());
      oracle.add_rows(weights.data(), {rows.data(), stride}, n_rows, width, 0.25f, expected.data());
      expect_near(sum, expected, 1, 0, width, "sums");
    }
  }
}

TEST_P(RowKernelsTest, soften_matches_the_scalar_kernel_over_several_runs) {
  RunningSoftmax got{-std::numeric_limits<float>::infinity(), 0};
  RunningSoftmax want = got;
  for (const std::int64_t n : {1, 5, 16, 20, 32}) {
    auto scores = normal(static_cast<std::size_t>(padded_row(n)));
    for (float& score : scores) score *= 20;
    auto expected = scores;
    const float shrink = tested.soften(scores.data(), n, got);
    EXPECT_NEAR(shrink, oracle.soften(expected.data(), n, want), kTolerance);
    expect_near(scores, expected, 1, 0, n, "weights");
    EXPECT_EQ(got.largest, want.largest);
    EXPECT_NEAR(got.total, want.total, kTolerance * want.total);
  }
}

INSTANTIATE_TEST_SUITE_P(targets, RowKernelsTest,
                         testing::ValuesIn(all_row_kernels().begin(), all_row_kernels().end()),
                         [](const auto& kernels) { return std::string(kernels.param.target); });

}  // namespace
}  // namespace kvpool::kernels
