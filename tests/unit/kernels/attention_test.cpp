#include "kvpool/kernels/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kvpool/formats/rows.h"
#include "kvpool/kernels/simd_target.h"

namespace kvpool::kernels {

void PrintTo(const AttentionKernel& kernel, std::ostream* out) { *out << kernel.target; }

namespace {

using formats::Format;

// fp32 sums of up to some thousand terms of size one, in another order.
constexpr double kTolerance = 2e-5;

struct Problem {
  std::int64_t n_queries, n_tokens, head_dim, value_dim;
  Format format = Format::kFp32;
  float key_size = 1;
};

struct Data {
  Problem problem;
  std::vector<float> queries, keys, values;  // as the kernel sees them: rounded to the format
  std::vector<std::byte> key_rows, value_rows;

  explicit Data(const Problem& p, unsigned seed = 7) : problem(p) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::int64_t n, float size) {
      std::vector<float> out(static_cast<std::size_t>(n));
      for (float& value : out) value = size * normal(random);
      return out;
    };
    queries = fill(p.n_queries * p.head_dim, 1);
    keys = fill(p.n_tokens * p.head_dim, p.key_size);
    values = fill(p.n_tokens * p.value_dim, 1);
    store();
  }

  void store() {
    for (auto [numbers, rows] : {std::pair{&keys, &key_rows}, {&values, &value_rows}}) {
      rows->resize(formats::row_bytes(problem.format, numbers->size()));
      ASSERT_EQ(formats::encode_row(problem.format, *numbers, *rows), std::nullopt);
      formats::decode_row(problem.format, *rows, *numbers);
    }
  }

  std::vector<float> run(const AttentionKernel& kernel) const {
    std::vector<float> output(static_cast<std::size_t>(problem.n_queries * problem.value_dim),
                              -99.0f);
    kernel.run({queries.data(), key_rows.data(), value_rows.data(), problem.format,
                problem.n_queries, problem.n_tokens, problem.head_dim, problem.value_dim,
                attention_scale(problem.head_dim), output.data()});
    return output;
  }

  // The definition, in double precision.
  std::vector<double> expected() const {
    std::vector<double> output;
    for (std::int64_t i = 0; i < problem.n_queries; ++i) {
      std::vector<double> scores;
      for (std::int64_t t = 0; t < problem.n_tokens; ++t) {
        double score = 0;
        for (std::int64_t j = 0; j < problem.head_dim; ++j) {
          score += static_cast<double>(queries[i * problem.head_dim + j]) *
                   keys[t * problem.head_dim + j];
        }
        scores.push_back(score / std::sqrt(static_cast<double>(problem.head_dim)));
      }
      const double largest = *std::ranges::max_element(scores);
      double total = 0;
      for (double& score : scores) total += score = std::exp(score - largest);
      for (std::int64_t j = 0; j < problem.value_dim; ++j) {
        double sum = 0;
        for (std::int64_t t = 0; t < problem.n_tokens; ++t) {
          sum += scores[t] * values[t * problem.value_dim + j];
        }
        output.push_back(sum / total);
      }
    }
    return output;
  }
};

class Attention : public testing::TestWithParam<AttentionKernel> {
 protected:
  void expect_right(const Problem& problem) {
    const Data data(problem);
    const std::vector<double> expected = data.expected();
    const std::vector<float> output = data.run(GetParam());
    for (std::size_t i = 0; i < output.size(); ++i) {
      ASSERT_NEAR(output[i], expected[i], kTolerance)
          << "number " << i << ", " << problem.n_queries << " x " << problem.n_tokens << " x "
          << problem.head_dim << " " << formats::traits(problem.format).name;
    }
  }
};

TEST_P(Attention, follows_the_definition_in_every_format_and_shape) {
  for (const Format format : {Format::kFp32, Format::kFp16, Format::kBf16}) {
    for (const std::int64_t n_tokens : {1, 2, 3, 4, 5, 63, 64, 65, 200}) {
      expect_right({1, n_tokens, 64, 64, format});
    }
    for (const std::int64_t dim : {1, 3, 15, 16, 17, 80, 96, 128, 129, 256}) {
      expect_right({1, 70, dim, dim, format});
    }
    expect_right({3, 90, 64, 32, format});
    expect_right({17, 130, 24, 56, format});
  }
  expect_right({2, 3000, 128, 128, Format::kFp32});
}

TEST_P(Attention, scores_of_thousands_do_not_overflow_the_softmax) {
  expect_right({2, 150, 64, 64, Format::kFp32, 3000});
}

TEST_P(Attention, fault_F44_scores_past_the_range_of_fp16_stay_exact) {
  // |<q, k>| up to about 1e7: infinite in fp16, ordinary in fp32.
  const Data data({1, 100, 128, 128, Format::kFp16, 10000});
  for (const float number : data.run(GetParam())) EXPECT_TRUE(std::isfinite(number));
}

TEST_P(Attention, equal_keys_give_the_mean_of_the_values) {
  Data data({1, 100, 16, 16});
  std::ranges::fill(data.keys, 0.5f);
  data.store();
  const std::vector<float> output = data.run(GetParam());
  for (std::size_t j = 0; j < 16; ++j) {
    double mean = 0;
    for (std::size_t t = 0; t < 100; ++t) mean += data.values[t * 16 + j] / 100.0;
    EXPECT_NEAR(output[j], mean, kTolerance);
  }
}

TEST_P(Attention, a_query_gets_the_same_bits_alone_and_in_a_batch) {
  const Data batch({20, 100, 48, 48});
  const std::vector<float> together = batch.run(GetParam());
  for (std::size_t i = 0; i < 20; ++i) {
    Data alone = batch;
    alone.problem.n_queries = 1;
    alone.queries.assign(batch.queries.begin() + static_cast<std::ptrdiff_t>(i * 48),
                         batch.queries.begin() + static_cast<std::ptrdiff_t>((i + 1) * 48));
    const std::vector<float> output = alone.run(GetParam());
    EXPECT_EQ(std::memcmp(output.data(), together.data() + i * 48, 48 * sizeof(float)), 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(EachTarget, Attention, testing::ValuesIn(attention_kernels()),
                         [](const auto& test) { return std::string(test.param.target); });

TEST(AttentionKernels, the_scalar_kernel_is_always_there_and_the_fastest_is_named) {
  const auto kernels = attention_kernels();
  EXPECT_EQ(kernels.back().target, "scalar");
  EXPECT_EQ(kernels.back().run, &attention_scalar);
  EXPECT_EQ(kernels.front().target, simd_target_name());
}

TEST(AttentionKernels, attention_runs_the_fastest) {
  const Data data({2, 50, 32, 32});
  EXPECT_THAT(data.run({"default", attention}),
              testing::ElementsAreArray(data.run(attention_kernels().front())));
}

}  // namespace
}  // namespace kvpool::kernels
