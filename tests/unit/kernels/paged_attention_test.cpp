#include "kvpool/kernels/paged_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "paged_problem.h"
#include "support/paged_problem.h"

namespace kvpool::kernels {

static void PrintTo(const PagedAttentionKernel& kernel, std::ostream* out) {
  *out << kernel.target;
}

namespace {

using formats::Format;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// fp32 sums in another order, and queries as integers of 16 bits for pages of codes.
constexpr double kTolerance = 1e-4;
// Outputs of size one in half precision.
constexpr double kHalfTolerance = 2e-3;
constexpr double kBfloatTolerance = 1.6e-2;

double tolerance(Format query_format) {
  if (query_format == Format::kFp32) return kTolerance;
  return query_format == Format::kFp16 ? kHalfTolerance : kBfloatTolerance;
}

class PagedAttention : public ::testing::TestWithParam<PagedAttentionKernel> {
 protected:
  /// The kernel for few queries, whatever their number.
  static PagedAttentionKernel decode() {
    PagedAttentionKernel kernel = GetParam();
    kernel.prefill = kernel.decode;
    return kernel;
  }

  static void expect_right(const PagedProblem& problem) {
    PagedData data(problem);
    expect_right(problem, data);
  }
  static void expect_right(const PagedProblem& problem, PagedData& data) {
    const std::vector<float> expected = data.expected();
    const std::vector<float> output = data.run(decode());
    ASSERT_EQ(output.size(), expected.size());
    for (std::size_t i = 0; i < output.size(); ++i) {
      ASSERT_NEAR(output[i], expected[i], tolerance(problem.query_format))
          << "number " << i << ", " << describe(problem);
    }
  }
};

TEST_P(PagedAttention, every_format_alone_and_all_in_one_sequence) {
  for (const Format format : formats::kPageFormats) {
    expect_right({.lengths = {300}, .formats = {format}});
    expect_right({.lengths = {37},
                  .n_q_heads = 2,
                  .key_dim = 128,
                  .value_dim = 128,
                  .block_size = 32,
                  .formats = {format}});
  }
  const std::vector<Format> all(formats::kPageFormats.begin(), formats::kPageFormats.end());
  expect_right({.lengths = {290}, .formats = all});
  expect_right({.lengths = {77}, .block_size = 8, .formats = all});
}

TEST_P(PagedAttention, every_head_dim) {
  for (const std::int64_t dim : {64, 80, 96, 128, 192, 256, 7, 20}) {
    for (const Format format :
         {Format::kFp32, Format::kFp16, Format::kInt8, Format::kInt4, Format::kInt3}) {
      expect_right({.lengths = {70}, .key_dim = dim, .value_dim = dim, .formats = {format}});
    }
  }
}

TEST_P(PagedAttention, values_narrower_or_wider_than_keys) {
  for (const Format format : {Format::kBf16, Format::kInt8}) {
    expect_right({.lengths = {70}, .key_dim = 192, .value_dim = 128, .formats = {format}});
    expect_right({.lengths = {70}, .key_dim = 64, .value_dim = 256, .formats = {format}});
  }
  // One latent head for all queries: 512 numbers and 64 of a rotary part.
  expect_right(
      {.lengths = {40}, .n_q_heads = 16, .n_kv_heads = 1, .key_dim = 576, .value_dim = 512});
}

TEST_P(PagedAttention, every_block_size_and_lengths_around_block_edges) {
  for (const std::int64_t size : {1, 8, 16, 32, 64, 256, 24}) {
    for (const std::int64_t length : {size - 1, size, size + 1, 2 * size, 3 * size + 5}) {
      if (length < 1) continue;
      for (const Format format : {Format::kFp16, Format::kInt4}) {
        expect_right(
            {.lengths = {length}, .n_q_heads = 2, .block_size = size, .formats = {format}});
      }
    }
  }
  for (const std::int64_t length : {255, 256, 257, 511, 512, 513}) {
    expect_right({.lengths = {length}, .formats = {Format::kFp16, Format::kInt8}});
  }
}

TEST_P(PagedAttention, any_number_of_queries_of_a_head) {
  for (const std::int64_t heads : {2, 4, 6, 8, 10, 14, 18}) {
    expect_right({.lengths = {40}, .n_q_heads = heads, .formats = {Format::kFp16, Format::kInt8}});
  }
  for (const std::int64_t queries : {2, 3, 5, 9}) {
    for (const bool causal : {true, false}) {
      expect_right({.lengths = {40, 9},
                    .n_queries = queries,
                    .formats = {Format::kFp32, Format::kInt4},
                    .causal = causal});
    }
  }
}

TEST_P(PagedAttention, queries_and_outputs_in_every_float_format) {
  for (const Format query : {Format::kFp32, Format::kFp16, Format::kBf16}) {
    for (const Format format : {Format::kFp32, Format::kFp16, Format::kBf16, Format::kInt8}) {
      for (const std::int64_t dim : {64, 20}) {
        expect_right({.lengths = {90},
                      .key_dim = dim,
                      .value_dim = dim,
                      .formats = {format},
                      .query_format = query});
      }
    }
  }
}

TEST_P(PagedAttention, ragged_batches) {
  expect_right({.lengths = {1, 300, 16, 17, 257, 2}, .formats = {Format::kFp16, Format::kInt4}});
  expect_right({.lengths = {33, 5}, .n_queries = 3, .block_size = 32});
}

TEST_P(PagedAttention, sliding_windows) {
  for (const std::int64_t window : {1, 2, 15, 16, 17, 100, 1000}) {
    for (const Format format : {Format::kFp16, Format::kInt8}) {
      expect_right({.lengths = {300, 40}, .formats = {format}, .window = window});
      expect_right({.lengths = {270}, .n_queries = 4, .formats = {format}, .window = window});
      expect_right({.lengths = {70},
                    .n_queries = 3,
                    .block_size = 8,
                    .formats = {format},
                    .causal = false,
                    .window = window});
    }
  }
}

TEST_P(PagedAttention, sinks_take_part_of_the_weight) {
  expect_right({.lengths = {300, 1}, .sinks = true});
  PagedProblem problem{.lengths = {20}, .n_queries = 2, .sinks = true};
  PagedData data(problem);
  data.sinks() = {-kInfinity, 100, -100, 0};
  expect_right(problem, data);
  // A sink of 100 leaves nothing for the tokens.
  const std::vector<float> output = data.run(decode());
  for (std::size_t j = 128; j < 256; ++j) EXPECT_NEAR(output[j], 0, 1e-6);
}

TEST_P(PagedAttention, masks_of_every_kind) {
  for (const MaskKind mask :
       {MaskKind::kBoolean, MaskKind::kFp32, MaskKind::kFp16, MaskKind::kBf16}) {
    for (const Format format : {Format::kFp16, Format::kInt4}) {
      expect_right({.lengths = {300, 50}, .formats = {format}, .mask = mask});
      expect_right({.lengths = {70},
                    .n_queries = 3,
                    .formats = {format},
                    .causal = false,
                    .window = 40,
                    .sinks = true,
                    .mask = mask});
    }
  }
}

TEST_P(PagedAttention, a_mask_may_be_broadcast) {
  PagedData data({.lengths = {60, 60}, .n_queries = 2, .mask = MaskKind::kBoolean});
  PagedAttentionParams params = data.params();
  params.mask_strides[0] = params.mask_strides[1] = 0;
  const std::vector<float> expected = data.run(paged_attention_kernels().back(), params);
  const std::vector<float> output = data.run(decode(), params);
  for (std::size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], expected[i], kTolerance);
}

TEST_P(PagedAttention, a_query_that_sees_nothing_gets_zeros) {
  for (const bool sinks : {false, true}) {
    PagedData data({.lengths = {300}, .n_queries = 2, .sinks = sinks, .mask = MaskKind::kBoolean});
    // Head 1, query 0 sees nothing.
    std::fill_n(data.mask().begin() + 2 * 300, 300, std::byte{0});
    const std::vector<float> output = data.run(decode());
    for (std::size_t j = 0; j < 64; ++j) EXPECT_EQ(output[2 * 64 + j], 0);
    for (const float number : output) EXPECT_TRUE(std::isfinite(number));
  }
  // More queries than tokens: the first ones lie before the sequence.
  PagedData data({.lengths = {3}, .n_q_heads = 1, .n_kv_heads = 1, .n_queries = 5});
  const std::vector<float> output = data.run(decode());
  for (std::size_t j = 0; j < 128; ++j) EXPECT_EQ(output[j], 0);
  for (std::size_t j = 128; j < 192; ++j) EXPECT_NE(output[j], 0);
}

TEST_P(PagedAttention, field_G5_a_tail_of_fp16_behind_blocks_of_int4) {
  expect_right(
      {.lengths = {5 * 16},
       .formats = {Format::kInt4, Format::kInt4, Format::kInt4, Format::kInt4, Format::kFp16}});
}

TEST_P(PagedAttention, field_G8_what_lies_in_unused_slots_does_not_count) {
  for (const Format format : formats::kPageFormats) {
    for (const std::int64_t size : {8, 16, 64}) {
      PagedData data({.lengths = {1, size + 1}, .block_size = size, .formats = {format}});
      for (const float number : data.run(decode())) ASSERT_TRUE(std::isfinite(number));
    }
  }
}

TEST_P(PagedAttention, large_scores_do_not_overflow_the_softmax) {
  PagedProblem problem{.lengths = {300}, .formats = {Format::kFp32, Format::kInt8}};
  PagedData data(problem);
  PagedAttentionParams params = data.params();
  params.scale = 1e4f;
  for (const float number : data.run(decode(), params)) ASSERT_TRUE(std::isfinite(number));
}

TEST_P(PagedAttention, a_query_of_nan_gives_nan_and_spoils_no_other_head) {
  for (const Format format : {Format::kFp16, Format::kInt8}) {
    PagedData data({.lengths = {40}, .formats = {format}});
    reinterpret_cast<float*>(data.queries().data())[64 + 3] = kInfinity - kInfinity;
    const std::vector<float> output = data.run(decode());
    for (std::size_t i = 0; i < output.size(); ++i) {
      ASSERT_EQ(std::isnan(output[i]), i / 64 == 1) << i;
    }
  }
}

TEST_P(PagedAttention, hidden_tokens_without_numbers_spoil_no_query) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Format format : formats::kPageFormats) {
    for (const MaskKind mask :
         {MaskKind::kNone, MaskKind::kBoolean, MaskKind::kFp32, MaskKind::kFp16}) {
      for (const std::int64_t window : {0, 5}) {
        for (const std::int64_t dim : {64, 40}) {
          PagedData data({.lengths = {300},
                          .n_queries = 3,
                          .key_dim = 64,
                          .value_dim = dim,
                          .formats = {format},
                          .window = window,
                          .mask = mask});
          const PagedAttentionParams params = data.params();
          const std::vector<float> before = data.run(decode(), params);
          // Queries are at 297 .. 299: the first token is behind the window of the last two, the
          // last is the future of the first two.
          testing::overwrite(params, params.values, 0, 293, kNan);
          testing::overwrite(params, params.keys, 0, 298, kNan);
          testing::overwrite(params, params.values, 0, 299, kNan);
          const std::vector<float> expected = data.expected();
          const std::vector<float> actual = data.run(decode(), params);
          for (std::size_t i = 0; i < expected.size(); ++i) {
            ASSERT_EQ(std::isnan(actual[i]), std::isnan(expected[i])) << i;
            if (!std::isnan(expected[i])) {
              EXPECT_NEAR(actual[i], before[i], 1e-5) << i;
            }
          }
        }
      }
    }
  }
}

TEST_P(PagedAttention, queries_as_integers_add_little_to_the_error_of_codes) {
  // Against pages of fp32 with the numbers that were encoded: the codes' own error, with queries as
  // they are (the oracle) and as the kernel takes them.
  for (const Format format : {Format::kInt8, Format::kInt4, Format::kInt2}) {
    PagedData coded({.lengths = {256}, .key_dim = 128, .value_dim = 128, .formats = {format}});
    PagedData exact(
        {.lengths = {256}, .key_dim = 128, .value_dim = 128, .formats = {Format::kFp32}});
    const std::vector<float> truth = exact.expected();
    const std::vector<float> oracle = coded.expected();
    const std::vector<float> output = coded.run(decode());
    double own = 0;
    double added = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
      own += (oracle[i] - truth[i]) * (oracle[i] - truth[i]);
      added += (output[i] - oracle[i]) * (output[i] - oracle[i]);
    }
    EXPECT_LT(std::sqrt(added), 0.01 * std::sqrt(own)) << formats::traits(format).name;
  }
}

TEST_P(PagedAttention, the_same_bits_with_any_number_of_threads) {
  WorkerPool two(2);
  WorkerPool three(3);
  PagedData data({.lengths = {2000, 30},
                  .n_queries = 2,
                  .formats = {Format::kFp16, Format::kInt8, Format::kInt4}});
  const std::vector<float> alone = data.run(decode());
  EXPECT_EQ(data.run(decode(), &two), alone);
  EXPECT_EQ(data.run(decode(), &three), alone);
}

TEST_P(PagedAttention, the_same_bits_alone_and_in_a_batch_and_wherever_pages_lie) {
  PagedData data({.lengths = {40, 700, 3}, .formats = {Format::kFp16, Format::kInt8}});
  PagedAttentionParams params = data.params();
  const std::vector<float> together = data.run(decode(), params);
  // The middle one alone, its pages in a table of their own and in order.
  std::vector<PageRef> keys, values;
  for (std::int64_t i = 0; i < 44; ++i) {
    keys.push_back(page_of(params, params.keys, 1, i));
    values.push_back(page_of(params, params.values, 1, i));
  }
  const std::int32_t indptr[] = {0, 44};
  params.keys.pages = keys.data();
  params.values.pages = values.data();
  params.indptr = indptr;
  params.indices = nullptr;
  params.last_page_len += 1;
  params.queries = static_cast<const float*>(params.queries) + params.q_strides[0];
  params.batch = 1;
  const std::vector<float> alone = data.run(decode(), params);
  EXPECT_EQ(std::memcmp(alone.data(), together.data() + 4 * 64, 4 * 64 * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(EachTarget, PagedAttention, ::testing::ValuesIn(paged_attention_kernels()),
                         [](const auto& test) { return std::string(test.param.target); });

TEST(PagedAttentionScalar, follows_the_definition) {
  const PagedProblem problem{.lengths = {50, 7},
                             .n_queries = 3,
                             .block_size = 8,
                             .formats = {Format::kFp16, Format::kInt8},
                             .window = 20,
                             .sinks = true,
                             .mask = MaskKind::kFp32};
  PagedData data(problem);
  const PagedAttentionParams p = data.params();
  const std::vector<float> output = data.expected();
  const auto* queries = static_cast<const float*>(p.queries);
  const auto* mask = static_cast<const float*>(p.mask);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t i = 0; i < 3; ++i) {
        const std::int64_t position = problem.lengths[b] - 3 + i;
        const std::int64_t at = (b * 4 + h) * 3 + i;
        double total = std::exp(static_cast<double>(p.sinks[h]));
        std::vector<double> sum(64);
        for (std::int64_t t = std::max<std::int64_t>(0, position - 19); t <= position; ++t) {
          const std::vector<float> key = data.row(p.keys, b, h / 2, t);
          double score = 0;
          for (std::int64_t j = 0; j < 64; ++j) score += double{queries[at * 64 + j]} * key[j];
          const double weight = std::exp(score / 8 + mask[at * 50 + t]);
          total += weight;
          const std::vector<float> value = data.row(p.values, b, h / 2, t);
          for (std::size_t j = 0; j < 64; ++j) sum[j] += weight * value[j];
        }
        for (std::int64_t j = 0; j < 64; ++j) {
          ASSERT_NEAR(output[at * 64 + j], sum[j] / total, 2e-5);
        }
      }
    }
  }
}

TEST(PagedAttentionKernels, the_scalar_kernel_is_always_there_and_the_fastest_runs) {
  EXPECT_EQ(paged_attention_kernels().back().target, "scalar");
  PagedData data({});
  const std::vector<float> expected = data.run(paged_attention_kernels().front());
  const PagedAttentionParams params = data.params();
  std::vector<std::byte> scratch(paged_attention_scratch_bytes(params, 1));
  paged_attention(params, scratch.data(), nullptr);
  EXPECT_EQ(data.output(), expected);
}

}  // namespace
}  // namespace kvpool::kernels
