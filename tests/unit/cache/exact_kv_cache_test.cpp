#include "kvpool/cache/exact_kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/formats/rows.h"

namespace kvpool::cache {
namespace {

using formats::Format;
using testing::Each;
using testing::HasSubstr;
using Row = std::vector<float>;

std::string refusal(auto&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

Row rounded(Format format, const Row& row) {
  std::vector<std::byte> bytes(formats::row_bytes(format, row.size()));
  EXPECT_EQ(formats::encode_row(format, row, bytes), std::nullopt);
  Row out(row.size());
  formats::decode_row(format, bytes, out);
  return out;
}

Row attend(const ExactKVCache& cache, const Row& query) {
  Row output(query.size(), -9.0f);
  cache.attend(query, output);
  return output;
}

std::vector<double> expected(const std::deque<std::pair<Row, Row>>& tokens, const Row& query) {
  std::vector<double> weights;
  double total = 0;
  for (const auto& [key, value] : tokens) {
    double score = 0;
    for (std::size_t j = 0; j < key.size(); ++j) score += static_cast<double>(query[j]) * key[j];
    weights.push_back(std::exp(score / std::sqrt(static_cast<double>(query.size()))));
    total += weights.back();
  }
  std::vector<double> output(query.size());
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (std::size_t j = 0; j < output.size(); ++j) {
      output[j] += weights[t] / total * tokens[t].second[j];
    }
  }
  return output;
}

class Random {
 public:
  Row row(std::size_t n) {
    Row out(n);
    for (float& value : out) value = normal_(engine_);
    return out;
  }

 private:
  std::mt19937 engine_{3};
  std::normal_distribution<float> normal_;
};

class EachFormat : public testing::TestWithParam<Format> {};

TEST_P(EachFormat, attends_exactly_over_what_it_keeps) {
  Random random;
  ExactKVCache cache({.head_dim = 24, .format = GetParam()});
  std::deque<std::pair<Row, Row>> tokens;
  for (int t = 0; t < 100; ++t) {
    const Row key = random.row(24);
    const Row value = random.row(24);
    if (t % 2 == 0) {
      cache.append(key, value);
    } else {
      cache.append_key(key);
      cache.append_value(value);
    }
    tokens.emplace_back(rounded(GetParam(), key), rounded(GetParam(), value));
    cache.check_invariants();
    const Row query = random.row(24);
    const Row output = attend(cache, query);
    const std::vector<double> right = expected(tokens, query);
    for (std::size_t j = 0; j < 24; ++j) ASSERT_NEAR(output[j], right[j], 1e-5) << t;
  }
  EXPECT_EQ(cache.size(), 100);
}

TEST_P(EachFormat, fault_F44_numbers_that_are_not_finite_in_the_format_are_refused) {
  ExactKVCache cache({.head_dim = 2, .format = GetParam()});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, infinity, -infinity}) {
    EXPECT_THAT(refusal([&] { cache.append_key(Row{0, bad}); }),
                HasSubstr("[ExactKVCache::append_key] key must be finite in"));
    EXPECT_THAT(refusal([&] { cache.append(Row{0, 0}, Row{bad, 0}); }), HasSubstr("value must be"));
  }
  if (GetParam() == Format::kFp16) {
    EXPECT_THAT(refusal([&] { cache.append_key(Row{65520, 0}); }), HasSubstr("65520"));
  }
  EXPECT_EQ(cache.size(), 0);
  EXPECT_FALSE(cache.has_pending_key());
}

INSTANTIATE_TEST_SUITE_P(ExactKVCache, EachFormat,
                         testing::Values(Format::kFp32, Format::kFp16, Format::kBf16),
                         [](const auto& test) {
                           return std::string(formats::traits(test.param).name);
                         });

TEST(ExactKVCache, an_empty_cache_answers_zeros) {
  const ExactKVCache cache({.head_dim = 3});
  EXPECT_THAT(attend(cache, {1, 2, 3}), Each(0.0f));
  EXPECT_EQ(cache.memory_bytes(), 0u);
}

TEST(ExactKVCache, a_full_ring_forgets_the_oldest_token) {
  Random random;
  ExactKVCache cache({.head_dim = 8, .format = Format::kFp32, .capacity = 5});
  std::deque<std::pair<Row, Row>> tokens;
  for (int t = 0; t < 23; ++t) {
    tokens.emplace_back(random.row(8), random.row(8));
    if (tokens.size() > 5) tokens.pop_front();
    cache.append(tokens.back().first, tokens.back().second);
    cache.check_invariants();
    EXPECT_EQ(cache.size(), static_cast<std::int64_t>(tokens.size()));
    const Row query = random.row(8);
    const std::vector<double> right = expected(tokens, query);
    const Row output = attend(cache, query);
    for (std::size_t j = 0; j < 8; ++j) ASSERT_NEAR(output[j], right[j], 1e-5) << t;
  }
  EXPECT_EQ(cache.memory_bytes(), 2 * 5 * 8 * sizeof(float));
}

TEST(ExactKVCache, a_waiting_key_takes_no_part) {
  ExactKVCache cache({.head_dim = 2, .format = Format::kFp32, .capacity = 1});
  cache.append(Row{1, 0}, Row{5, 6});
  cache.append_key(Row{9, 9});
  EXPECT_EQ(cache.size(), 1);
  EXPECT_THAT(attend(cache, {1, 1}), testing::ElementsAre(5, 6));
  cache.discard_key();
  cache.append_key(Row{2, 2});
  cache.append_value(Row{7, 8});
  EXPECT_THAT(attend(cache, {1, 1}), testing::ElementsAre(7, 8));
}

TEST(ExactKVCache, keys_and_values_out_of_turn_are_refused) {
  ExactKVCache cache({.head_dim = 1});
  EXPECT_THAT(refusal([&] { cache.append_value(Row{1}); }), HasSubstr("a value must follow"));
  cache.append_key(Row{1});
  EXPECT_THAT(refusal([&] { cache.append_key(Row{1}); }), HasSubstr("still waits for its value"));
  EXPECT_THAT(refusal([&] { cache.append(Row{1}, Row{1}); }), HasSubstr("still waits"));
  cache.append_value(Row{2});
  EXPECT_EQ(cache.size(), 1);
}

TEST(ExactKVCache, wrong_shapes_and_settings_are_named) {
  ExactKVCache cache({.head_dim = 4});
  EXPECT_THAT(refusal([&] { cache.append_key(Row(5)); }), HasSubstr("must have 4 numbers, got 5"));
  EXPECT_THAT(refusal([&] { attend(cache, Row(6)); }), HasSubstr("rows of 4 numbers, got 6"));
  EXPECT_THAT(refusal([] { ExactKVCache({.head_dim = 0}); }),
              HasSubstr("head_dim must be in 1..1048576, got 0"));
  EXPECT_THAT(refusal([] { ExactKVCache({.head_dim = 1, .format = Format::kInt4}); }),
              HasSubstr("format must be fp32, fp16 or bf16, got 'int4'"));
  EXPECT_THAT(refusal([] { ExactKVCache({.head_dim = 1, .capacity = 0}); }),
              HasSubstr("capacity must be >= 1, got 0"));
}

TEST(ExactKVCache, fault_F42_memory_bytes_is_what_is_allocated_and_grows_by_doubling) {
  ExactKVCache cache({.head_dim = 64, .format = Format::kFp16});
  int growths = 0;
  std::size_t last = 0;
  for (int t = 0; t < 1000; ++t) {
    cache.append(Row(64), Row(64));
    if (cache.memory_bytes() != last) ++growths;
    last = cache.memory_bytes();
  }
  EXPECT_EQ(last, 2 * 1024 * 64 * 2u);
  EXPECT_EQ(growths, 7);  // 16, 32, ..., 1024 rows
}

TEST(ExactKVCache, reset_forgets_tokens_and_keeps_memory) {
  ExactKVCache cache({.head_dim = 2, .capacity = 3});
  for (int t = 0; t < 5; ++t) cache.append(Row{1, 1}, Row{1, 1});
  cache.append_key(Row{1, 1});
  const std::size_t bytes = cache.memory_bytes();
  cache.reset();
  cache.check_invariants();
  EXPECT_EQ(cache.size(), 0);
  EXPECT_FALSE(cache.has_pending_key());
  EXPECT_EQ(cache.memory_bytes(), bytes);
  EXPECT_THAT(attend(cache, {1, 1}), Each(0.0f));
}

}  // namespace
}  // namespace kvpool::cache
