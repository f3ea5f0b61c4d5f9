// Attention of many queries over pages, against the oracle, on every target.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "kvpool/formats/format.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"
#include "support/paged_problem.h"

namespace kvpool::kernels {

void PrintTo(const PagedAttentionKernel& kernel, std::ostream* out) { *out << kernel.target; }

namespace {

using formats::Format;
using testing::PagedProblem;
using testing::PagedShape;

class PagedPrefill : public ::testing::TestWithParam<PagedAttentionKernel> {
 protected:
  void expect_as_scalar(const PagedShape& shape) {
    PagedProblem problem(shape);
    const std::vector<float> expected = problem.expected();
    const std::vector<float> actual = problem.run(prefill());
    ASSERT_EQ(actual.size(), expected.size());
    // fp32 sums of some hundred terms of size one in another order, then rounded.
    const double tolerance = shape.query_format == Format::kFp32   ? 1e-5
                             : shape.query_format == Format::kFp16 ? 2e-3
                                                                   : 1.6e-2;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      wrong += !(std::abs(actual[i] - expected[i]) <= tolerance);
    }
    EXPECT_EQ(wrong, 0u) << "of " << expected.size() << " numbers";
  }

  /// The kernel, whatever the number of queries.
  static PagedAttentionKernel prefill() {
    PagedAttentionKernel kernel = GetParam();
    kernel.decode = kernel.prefill;
    return kernel;
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, PagedPrefill, ::testing::ValuesIn(paged_attention_kernels()),
                         [](const auto& test) { return std::string(test.param.target); });

TEST_P(PagedPrefill, every_page_format_and_query_format) {
  for (const Format format : formats::kPageFormats) {
    SCOPED_TRACE(formats::traits(format).name);
    expect_as_scalar({.formats = {format}});
  }
  for (const Format format : {Format::kFp16, Format::kBf16}) {
    SCOPED_TRACE(formats::traits(format).name);
    expect_as_scalar({.formats = {format}, .query_format = format});
  }
}

TEST_P(PagedPrefill, pages_of_all_formats_in_one_sequence) {
  expect_as_scalar(
      {.n_tokens = {150}, .formats = {formats::kPageFormats.begin(), formats::kPageFormats.end()}});
}

TEST_P(PagedPrefill, head_dims_of_keys_and_values) {
  for (const std::int64_t dim : {1, 5, 64, 80, 96, 128, 192, 256}) {
    SCOPED_TRACE(dim);
    expect_as_scalar({.key_dim = dim, .value_dim = dim, .n_queries = 9, .n_tokens = {70}});
  }
  expect_as_scalar({.key_dim = 192, .value_dim = 128, .n_queries = 9, .n_tokens = {70}});
  // Multi-head latent attention: one kv head for many q heads.
  expect_as_scalar({.n_q_heads = 16,
                    .n_kv_heads = 1,
                    .key_dim = 576,
                    .value_dim = 512,
                    .n_queries = 3,
                    .n_tokens = {70}});
  expect_as_scalar({.n_q_heads = 16,
                    .n_kv_heads = 1,
                    .key_dim = 576,
                    .n_queries = 3,
                    .n_tokens = {70},
                    .one_stream = true});
}

TEST_P(PagedPrefill, block_sizes) {
  for (const std::int64_t block_size : {1, 8, 16, 24, 32, 64, 256}) {
    SCOPED_TRACE(block_size);
    expect_as_scalar({.block_size = block_size,
                      .n_queries = 9,
                      .n_tokens = {140},
                      .formats = {Format::kFp16, Format::kInt8}});
  }
}

TEST_P(PagedPrefill, lengths_around_the_edges_of_blocks_and_tiles) {
  for (const std::int64_t n_tokens : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
    for (const bool causal : {true, false}) {
      SCOPED_TRACE(std::to_string(n_tokens) + (causal ? " causal" : ""));
      expect_as_scalar({.key_dim = 16,
                        .value_dim = 16,
                        .n_queries = std::min<std::int64_t>(n_tokens, 70),
                        .n_tokens = {n_tokens},
                        .causal = causal});
    }
  }
}

TEST_P(PagedPrefill, numbers_of_queries_around_the_edges_of_row_tiles) {
  for (const std::int64_t n_queries : {1, 2, 7, 8, 9, 31, 32, 33, 129, 200}) {
    SCOPED_TRACE(n_queries);
    expect_as_scalar({.n_q_heads = 3,
                      .n_kv_heads = 1,
                      .key_dim = 16,
                      .value_dim = 24,
                      .n_queries = n_queries,
                      .n_tokens = {210}});
  }
}

TEST_P(PagedPrefill, groups_of_q_heads) {
  for (const std::int64_t group : {1, 5, 9, 128, 150}) {
    SCOPED_TRACE(group);
    expect_as_scalar({.n_q_heads = 2 * group,
                      .n_kv_heads = 2,
                      .key_dim = 16,
                      .value_dim = 16,
                      .n_queries = 5,
                      .n_tokens = {66}});
  }
}

TEST_P(PagedPrefill, more_queries_than_tokens) {
  // The first queries are before the first token and see nothing.
  expect_as_scalar({.n_queries = 40, .n_tokens = {17}});
  expect_as_scalar({.n_queries = 40, .n_tokens = {17}, .sinks = true});
}

TEST_P(PagedPrefill, windows) {
  for (const std::int64_t window : {1, 3, 16, 40, 64, 100, 1000}) {
    for (const bool causal : {true, false}) {
      SCOPED_TRACE(std::to_string(window) + (causal ? " causal" : ""));
      expect_as_scalar({.key_dim = 16,
                        .value_dim = 16,
                        .n_queries = 50,
                        .n_tokens = {200},
                        .causal = causal,
                        .window = window});
    }
  }
}

TEST_P(PagedPrefill, tokens_before_every_querys_window_are_not_read) {
  PagedProblem problem({.n_queries = 10, .n_tokens = {200}, .window = 20});
  const std::vector<float> expected = problem.run(prefill());
  // The first query is at 190 and sees 171 on: block 10 and later.
  std::vector<PageRef> keys(problem.params().keys.pages,
                            problem.params().keys.pages + problem.params().keys.n_pages);
  for (std::int64_t page = 0; page < 10; ++page) {
    keys[static_cast<std::size_t>(problem.params().indices[page])].data = nullptr;
  }
  problem.params().keys.pages = keys.data();
  EXPECT_EQ(problem.run(prefill()), expected);
}

TEST_P(PagedPrefill, masks_of_every_kind) {
  for (const MaskKind mask :
       {MaskKind::kBoolean, MaskKind::kFp32, MaskKind::kFp16, MaskKind::kBf16}) {
    for (const bool per_head : {true, false}) {
      for (const bool causal : {true, false}) {
        expect_as_scalar({.n_queries = 40,
                          .n_tokens = {150},
                          .causal = causal,
                          .mask = mask,
                          .mask_per_head = per_head});
      }
    }
  }
}

TEST_P(PagedPrefill, sinks) {
  expect_as_scalar({.n_tokens = {150}, .window = 30, .sinks = true});
  expect_as_scalar({.n_tokens = {150}, .sinks = true, .mask = MaskKind::kBoolean});
}

TEST_P(PagedPrefill, a_batch_of_ragged_sequences) {
  expect_as_scalar({.n_tokens = {1, 100, 16, 65, 64}, .formats = {Format::kFp16, Format::kInt4}});
}

TEST_P(PagedPrefill, same_bits_for_any_number_of_threads) {
  for (const std::int64_t n_kv_heads : {1, 4}) {
    PagedProblem problem({.n_q_heads = 4,
                          .n_kv_heads = n_kv_heads,
                          .n_queries = 90,
                          .n_tokens = {300},
                          .formats = {Format::kFp16, Format::kInt8},
                          .window = 150,
                          .sinks = true});
    const std::vector<float> alone = problem.run(prefill());
    for (const int n_threads : {1, 2, 3, 8}) {
      WorkerPool workers(n_threads);
      EXPECT_EQ(problem.run(prefill(), &workers), alone) << n_threads << " threads";
    }
  }
}

TEST_P(PagedPrefill, same_bits_alone_and_in_a_batch) {
  PagedProblem batch({.n_queries = 33, .n_tokens = {40, 130, 100}, .formats = {Format::kFp16}});
  const std::vector<float> together = batch.run(prefill());
  PagedAttentionParams& p = batch.params();
  const auto numbers = static_cast<std::ptrdiff_t>(together.size() / 3);
  const auto* queries = static_cast<const float*>(p.queries);
  const std::int32_t* indptr = p.indptr;
  const std::int32_t* last_page_len = p.last_page_len;
  p.batch = 1;
  for (std::ptrdiff_t b = 0; b < 3; ++b) {
    p.queries = queries + b * p.q_strides[0];
    p.indptr = indptr + b;
    p.last_page_len = last_page_len + b;
    const std::vector<float> expected(together.begin() + b * numbers,
                                      together.begin() + (b + 1) * numbers);
    EXPECT_EQ(batch.run(prefill()), expected);
  }
}

TEST_P(PagedPrefill, same_bits_for_a_prompt_at_once_and_in_chunks) {
  PagedProblem problem({.n_queries = 100, .n_tokens = {100}, .formats = {Format::kFp16}});
  const std::vector<float> at_once = problem.run(prefill());
  PagedAttentionParams& p = problem.params();
  // The last 30 queries alone see the same tokens.
  p.queries = static_cast<const float*>(p.queries) + 70 * p.q_strides[2];
  p.n_queries = 30;
  std::vector<float> output(static_cast<std::size_t>(4 * 30 * 64));
  p.output = output.data();
  p.out_strides[1] = 30 * 64;
  p.out_strides[2] = 64;
  AlignedBuffer scratch(prefill().scratch_bytes(p, 1));
  prefill().run(p, scratch.data(), nullptr);
  for (std::size_t h = 0; h < 4; ++h) {
    EXPECT_EQ(std::memcmp(output.data() + h * 30 * 64, at_once.data() + (h * 100 + 70) * 64,
                          30 * 64 * sizeof(float)),
              0);
  }
}

TEST_P(PagedPrefill, a_mask_of_the_lowest_number_everywhere_hides_nothing) {
  PagedProblem problem({.n_queries = 10, .n_tokens = {30}, .causal = false});
  const float lowest = std::numeric_limits<float>::lowest();
  problem.params().mask = &lowest;
  problem.params().mask_kind = MaskKind::kFp32;  // strides of 0: one number for all
  for (const float number : problem.run(prefill())) EXPECT_NE(number, 0.0f);
}

TEST_P(PagedPrefill, a_query_that_is_not_a_number_gives_no_number_and_spoils_no_other) {
  PagedProblem problem({.n_queries = 10, .n_tokens = {70}});
  const std::vector<float> before = problem.run(prefill());
  auto* queries = static_cast<float*>(const_cast<void*>(problem.params().queries));
  queries[3 * problem.params().q_strides[2] + 5] = std::nanf("");  // query 3 of head 0
  std::vector<float> after = problem.run(prefill());
  for (std::ptrdiff_t j = 0; j < 64; ++j) {
    EXPECT_TRUE(std::isnan(after[static_cast<std::size_t>(3 * 64 + j)]));
  }
  std::copy_n(before.begin() + 3 * 64, 64, after.begin() + 3 * 64);
  EXPECT_EQ(after, before);
}

/// Hidden tokens without numbers: in causal order, behind windows and by masks of every kind.
std::vector<PagedShape> problems_that_hide(Format format, bool one_stream) {
  std::vector<PagedShape> shapes;
  for (const MaskKind mask :
       {MaskKind::kNone, MaskKind::kBoolean, MaskKind::kFp32, MaskKind::kFp16, MaskKind::kBf16}) {
    for (const std::int64_t window : {0, 4}) {
      shapes.push_back({.value_dim = 40,
                        .n_tokens = {100},
                        .formats = {format},
                        .window = window,
                        .mask = mask,
                        .one_stream = one_stream});
    }
  }
  return shapes;
}

TEST_P(PagedPrefill, hidden_tokens_without_numbers_spoil_no_query) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Format format : {Format::kFp32, Format::kFp16, Format::kBf16, Format::kInt8}) {
    for (const bool one_stream : {false, true}) {
      for (const PagedShape& shape : problems_that_hide(format, one_stream)) {
        SCOPED_TRACE(std::string(formats::traits(format).name) + (one_stream ? " one stream" : "") +
                     ", window " + std::to_string(shape.window) + ", mask " +
                     std::to_string(static_cast<int>(shape.mask)));
        PagedProblem problem(shape);
        const PagedAttentionParams& p = problem.params();
        const std::vector<float> before = problem.run(prefill());
        // Queries are at 80 .. 99: windows leave token 78 behind, the others are still to come for
        // the first ones.
        if (shape.window > 0) testing::overwrite(p, p.values, 0, 78, kNan);
        testing::overwrite(p, p.values, 0, 85, one_stream ? kNan : -kInfinity);
        testing::overwrite(p, p.keys, 0, 92, kNan);
        testing::overwrite(p, p.values, 0, 99, kNan);
        const std::vector<float> expected = problem.expected();
        const std::vector<float> actual = problem.run(prefill());
        std::size_t n_finite = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_EQ(std::isnan(actual[i]), std::isnan(expected[i])) << i << ": " << actual[i];
          if (std::isfinite(expected[i])) {
            EXPECT_EQ(actual[i], before[i]) << i;
            ++n_finite;
          } else if (!std::isnan(expected[i])) {
            EXPECT_EQ(actual[i], expected[i]) << i;
          }
        }
        EXPECT_GT(n_finite, 0u);
        EXPECT_LT(n_finite, expected.size());
      }
    }
  }
}

TEST_P(PagedPrefill, outputs_are_rounded_to_the_nearest_even) {
  // Of one token the output is its value.
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0xffff0000u; bits += 0x10fffu) {
    values.push_back(std::bit_cast<float>(bits));
  }
  for (const float half : {65504.0f, 65519.0f, 65520.0f, 0x1p-14f, 0x1.8p-25f, 0x1p-25f, 0x1.002p0f,
                           0x1.006p0f, 0x1.01p0f, 0x1.03p0f}) {
    values.push_back(half);
    values.push_back(-half);
  }
  const auto dim = static_cast<std::int64_t>(values.size());
  for (const Format format : {Format::kFp16, Format::kBf16}) {
    PagedProblem problem(
        {.value_dim = dim, .n_queries = 1, .n_tokens = {1}, .query_format = format});
    PageRef page = problem.params().values.pages[0];
    problem.params().values.pages = &page;
    std::vector<float> head(values);
    head.resize(static_cast<std::size_t>(2 * 16 * dim));
    page.data = reinterpret_cast<const std::byte*>(head.data());
    const std::vector<float> output = problem.run(prefill());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float expected = format == Format::kFp16
                                 ? half_to_float(float_to_half(values[i]))
                                 : bfloat16_to_float(float_to_bfloat16(values[i]));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(output[i])) << values[i];
      } else {
        ASSERT_EQ(output[i], expected) << values[i];
      }
    }
  }
}

TEST_P(PagedPrefill, large_scores_do_not_overflow) {
  PagedProblem problem({.n_queries = 20, .n_tokens = {90}});
  problem.params().scale = 1e4f;
  const std::vector<float> expected = problem.expected();
  const std::vector<float> actual = problem.run(prefill());
  // Scores of some ten thousand have a unit in the last place of 1e-3: weights differ by as much.
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 0.1);
}

}  // namespace
}  // namespace kvpool::kernels
