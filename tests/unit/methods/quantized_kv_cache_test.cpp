#include "kvpool/methods/quantized_kv_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "kvpool/base/error.h"
#include "kvpool/methods/registry.h"
#include "vectors.h"

namespace kvpool::methods {
namespace {

constexpr std::int64_t kDims = 32;

Vectors attend(const QuantizedKVCache& cache, const Vectors& queries,
               QuantizedKVCache::Queries how = {}) {
  how.data = queries.data();
  Vectors output(queries.size(), 99.0f);
  cache.attend(how, output.data());
  return output;
}

void append_pairs(QuantizedKVCache& cache, const Vectors& keys, const Vectors& values,
                  std::int64_t first, std::int64_t last) {
  const std::int64_t dims = cache.head_dim();
  for (std::int64_t t = first; t < last; ++t) {
    cache.append_key(keys.data() + t * dims);
    cache.append_value(values.data() + t * dims);
  }
}

/// What InvalidArgument `call` throws says; the cache is as before.
template <class Call>
std::string refusal(QuantizedKVCache& cache, Call call) {
  const std::int64_t size = cache.size();
  const std::int64_t bytes = cache.memory_bytes();
  std::string message = "nothing was refused";
  try {
    call();
  } catch (const InvalidArgument& error) {
    message = error.what();
  }
  EXPECT_EQ(cache.size(), size);
  EXPECT_EQ(cache.memory_bytes(), bytes);
  cache.check_invariants();
  return message;
}

class QuantizedKVCacheTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr std::int64_t kTokens = 200;

  KVCacheConfig config{.method = GetParam(), .head_dim = kDims, .bit_width_inlier = 4};
  Vectors keys = normal_vectors(kTokens, kDims, 1);
  Vectors values = normal_vectors(kTokens, kDims, 2);
  Vectors query = normal_vectors(1, kDims, 3);
};

TEST_P(QuantizedKVCacheTest, empty_cache_answers_zeros_and_takes_no_memory) {
  QuantizedKVCache cache(config);
  EXPECT_EQ(attend(cache, query), Vectors(kDims));
  EXPECT_EQ(cache.size(), 0);
  // fault_F43: there, 32 megabytes for each layer and head.
  EXPECT_EQ(cache.memory_bytes(), 0);
  cache.check_invariants();
}

TEST_P(QuantizedKVCacheTest, field_G3_forty_tokens_at_once_equal_forty_times_one) {
  for (const std::int64_t residual : {0, 5, 128}) {
    config.residual_length = residual;
    QuantizedKVCache at_once(config), one_by_one(config), in_parts(config);
    for (std::int64_t n : {40, 160}) {
      const std::int64_t first = at_once.size();
      at_once.append(keys.data() + first * kDims, values.data() + first * kDims, {}, n);
      append_pairs(one_by_one, keys, values, first, first + n);
      in_parts.append(keys.data() + first * kDims, values.data() + first * kDims, {}, n - 33);
      in_parts.append(keys.data() + (first + n - 33) * kDims,
                      values.data() + (first + n - 33) * kDims, {}, 33);
      const Vectors expected = attend(at_once, query);
      EXPECT_EQ(attend(one_by_one, query), expected);
      EXPECT_EQ(attend(in_parts, query), expected);
      EXPECT_EQ(one_by_one.n_exact(), at_once.n_exact());
      EXPECT_EQ(one_by_one.memory_bytes(), at_once.memory_bytes());
      for (const auto* cache : {&at_once, &one_by_one, &in_parts}) cache->check_invariants();
    }
  }
}

TEST_P(QuantizedKVCacheTest, tokens_are_attended_in_any_order_alike) {
  config.residual_length = 32;  // kivi's groups would depend on the order
  QuantizedKVCache forward(config), backward(config);
  forward.append(keys.data(), values.data(), {}, 32);
  for (std::int64_t t = 31; t >= 0; --t) {
    backward.append(keys.data() + t * kDims, values.data() + t * kDims, {}, 1);
  }
  const Vectors a = attend(forward, query);
  const Vectors b = attend(backward, query);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5f);
}

TEST_P(QuantizedKVCacheTest, heads_and_sequences_are_each_like_a_cache_of_their_own) {
  constexpr std::int64_t kBatch = 2, kHeads = 3, kShared = 2, kQueries = 4;
  const std::int64_t per_head = kTokens * kDims;
  const Vectors all_keys = normal_vectors(kBatch * kHeads * kTokens, kDims, 4);
  const Vectors all_values = normal_vectors(kBatch * kHeads * kTokens, kDims, 5);
  const Vectors queries = normal_vectors(kBatch * kHeads * kShared * kQueries, kDims, 6);
  QuantizedKVCache cache(config);
  cache.append(all_keys.data(), all_values.data(), {kBatch, kHeads}, kTokens);
  const Vectors found = attend(cache, queries,
                               {.batch = kBatch,
                                .n_heads = kHeads * kShared,
                                .n_queries = kQueries,
                                .causal_offset = kTokens - kQueries});
  cache.check_invariants();
  for (std::int64_t row = 0; row < kBatch * kHeads * kShared * kQueries; ++row) {
    const std::int64_t head = row / (kShared * kQueries);
    QuantizedKVCache single(config);
    single.append(all_keys.data() + head * per_head, all_values.data() + head * per_head, {},
                  kTokens);
    const Vectors own(queries.begin() + row * kDims, queries.begin() + (row + 1) * kDims);
    const Vectors expected =
        attend(single, own, {.causal_offset = kTokens - kQueries + row % kQueries});
    for (std::int64_t i = 0; i < kDims; ++i) {
      EXPECT_EQ(found[static_cast<std::size_t>(row * kDims + i)],
                expected[static_cast<std::size_t>(i)]);
    }
  }
}

TEST_P(QuantizedKVCacheTest, causal_queries_see_what_came_before_them) {
  QuantizedKVCache cache(config);
  cache.append(keys.data(), values.data(), {}, kTokens);
  const Vectors seen = attend(cache, query, {.causal_offset = 0});
  for (std::int64_t i = 0; i < kDims; ++i) {  // one token: its value
    EXPECT_NEAR(seen[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(i)], 0.6f);
  }
  EXPECT_EQ(attend(cache, query, {.causal_offset = -1}), Vectors(kDims));
  EXPECT_EQ(attend(cache, query, {.causal_offset = kTokens - 1}), attend(cache, query));
  EXPECT_EQ(attend(cache, query, {.causal_offset = kTokens + 50}), attend(cache, query));
}

TEST_P(QuantizedKVCacheTest, fault_F27_a_ring_holds_the_newest_tokens_and_gives_pages_back) {
  config.capacity = 70;
  QuantizedKVCache ring(config), newest(config);
  std::int64_t early_bytes = 0, late_bytes = 0;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    append_pairs(ring, keys, values, t, t + 1);
    ring.check_invariants();
    EXPECT_EQ(ring.size(), std::min<std::int64_t>(t + 1, 70));
    std::int64_t& most = t < 140 ? early_bytes : late_bytes;
    most = std::max(most, ring.memory_bytes());
  }
  EXPECT_EQ(ring.begin(), kTokens - 70);
  EXPECT_LE(late_bytes, early_bytes);
  // Groups and the exact part are cut elsewhere, so the numbers are close, not equal.
  append_pairs(newest, keys, values, kTokens - 70, kTokens);
  EXPECT_GT(cosine(attend(ring, query).data(), attend(newest, query).data(), kDims), 0.98);
}

TEST_P(QuantizedKVCacheTest, a_ring_equals_itself_however_it_was_filled) {
  config.capacity = 70;
  QuantizedKVCache one_by_one(config), at_once(config);
  append_pairs(one_by_one, keys, values, 0, kTokens);
  at_once.append(keys.data(), values.data(), {}, kTokens);
  EXPECT_EQ(attend(one_by_one, query), attend(at_once, query));
  EXPECT_EQ(one_by_one.memory_bytes(), at_once.memory_bytes());
}

TEST_P(QuantizedKVCacheTest, fault_F44_numbers_that_are_not_finite_are_refused) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  QuantizedKVCache cache(config);
  append_pairs(cache, keys, values, 0, 3);
  const Vectors before = attend(cache, query);
  for (const float bad : {kNan, kInfinity, -kInfinity, 1e30f}) {
    Vectors broken(2 * kDims, 1.0f);
    broken.back() = bad;
    const Vectors good(2 * kDims, 1.0f);
    EXPECT_NE(refusal(cache, [&] { cache.append(broken.data(), good.data(), {}, 2); }),
              "nothing was refused");
    EXPECT_NE(refusal(cache, [&] { cache.append(good.data(), broken.data(), {}, 2); }),
              "nothing was refused");
    EXPECT_NE(refusal(cache, [&] { cache.append_key(broken.data() + kDims); }),
              "nothing was refused");
  }
  cache.append_key(keys.data());
  Vectors nan(kDims, kNan);
  EXPECT_EQ(refusal(cache, [&] { cache.append_value(nan.data()); }),
            "[QuantizedKVCache::append_value] value must be finite, got nan");
  cache.discard_key();
  EXPECT_EQ(attend(cache, query), before);
}

TEST_P(QuantizedKVCacheTest, fault_F44_large_scores_stay_finite) {
  QuantizedKVCache cache(config);
  Vectors large = keys;
  for (float& number : large) number *= 1000;
  cache.append(large.data(), values.data(), {}, 100);
  Vectors large_query = query;
  for (float& number : large_query) number *= 1000;  // scores of 10^7, past half floats
  for (const float number : attend(cache, large_query)) EXPECT_TRUE(std::isfinite(number));
}

TEST_P(QuantizedKVCacheTest, pairs_that_do_not_match_are_refused) {
  QuantizedKVCache cache(config);
  EXPECT_EQ(refusal(cache, [&] { cache.append_value(values.data()); }),
            "[QuantizedKVCache::append_value] no key waits for a value");
  cache.append_key(keys.data());
  EXPECT_EQ(refusal(cache, [&] { cache.append_key(keys.data()); }),
            "[QuantizedKVCache::append_key] the key before waits for its value");
  EXPECT_EQ(refusal(cache, [&] { cache.append(keys.data(), values.data(), {}, 1); }),
            "[QuantizedKVCache::append] the key that was appended last waits for its value");
  EXPECT_EQ(attend(cache, query), Vectors(kDims));  // a lone key takes part in nothing
  cache.append_value(values.data());
  EXPECT_EQ(refusal(cache, [&] { cache.append_value(values.data()); }),
            "[QuantizedKVCache::append_value] no key waits for a value");
  EXPECT_EQ(cache.size(), 1);
  cache.append_key(keys.data());
  cache.discard_key();
  EXPECT_FALSE(cache.has_pending_key());
}

TEST_P(QuantizedKVCacheTest, shapes_that_do_not_match_are_refused) {
  QuantizedKVCache cache(config);
  cache.append(keys.data(), values.data(), {2, 2}, 5);
  EXPECT_EQ(refusal(cache, [&] { cache.append(keys.data(), values.data(), {2, 1}, 5); }),
            "[QuantizedKVCache::append] holds batch 2, n_kv_heads 2, got 2, 1");
  EXPECT_EQ(refusal(cache, [&] { cache.append_key(keys.data()); }),
            "[QuantizedKVCache::append_key] needs a cache of one sequence and head, holds batch 2, "
            "n_kv_heads 2");
  EXPECT_EQ(refusal(cache, [&] { attend(cache, keys, {.batch = 2, .n_heads = 3}); }),
            "[QuantizedKVCache::attend] holds batch 2, n_kv_heads 2, got queries of batch 2, "
            "n_heads 3");
  EXPECT_NE(refusal(cache, [&] { cache.append(keys.data(), values.data(), {0, 1}, 5); }),
            "nothing was refused");
  cache.reset();
  cache.append_key(keys.data());  // an empty cache takes any shape
  cache.append_value(values.data());
  EXPECT_EQ(cache.shape(), QuantizedKVCache::Shape{});
}

TEST_P(QuantizedKVCacheTest, reset_forgets_everything) {
  QuantizedKVCache cache(config), fresh(config);
  cache.append(values.data(), keys.data(), {}, 150);
  cache.append_key(keys.data());
  cache.reset();
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.memory_bytes(), 0);
  EXPECT_FALSE(cache.has_pending_key());
  cache.check_invariants();
  cache.append(keys.data(), values.data(), {}, 150);
  fresh.append(keys.data(), values.data(), {}, 150);
  EXPECT_EQ(attend(cache, query), attend(fresh, query));
}

TEST_P(QuantizedKVCacheTest, fault_F42_memory_is_what_packed_tokens_take) {
  config.residual_length = 0;
  QuantizedKVCache cache(config);
  cache.append(keys.data(), values.data(), {}, 192);  // three whole pages
  EXPECT_EQ(static_cast<double>(cache.memory_bytes()), 192 * coded_bytes_per_token(cache.method()));
  EXPECT_LT(cache.memory_bytes(), 192 * kDims * 4);  // as half floats
}

// One method, its rotations and codebooks, serves any number of caches and threads.
TEST_P(QuantizedKVCacheTest, two_caches_of_one_method_run_on_two_threads) {
  const auto method = make_method(config);
  QuantizedKVCache expected(method);
  expected.append(keys.data(), values.data(), {}, kTokens);
  const Vectors answer = attend(expected, query);
  Vectors answers[2];
  std::vector<std::thread> threads;
  for (Vectors& found : answers) {
    threads.emplace_back([&] {
      QuantizedKVCache cache(method);
      append_pairs(cache, keys, values, 0, kTokens);
      found = attend(cache, query);
    });
  }
  threads.emplace_back([&] { EXPECT_EQ(attend(expected, query), answer); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(answers[0], answer);
  EXPECT_EQ(answers[1], answer);
}

INSTANTIATE_TEST_SUITE_P(methods, QuantizedKVCacheTest, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const MethodInfo& row : methods()) names.emplace_back(row.name);
                           return names;
                         }()),
                         [](const auto& tested) { return tested.param; });

TEST(QuantizedKVCacheKivi, field_G3_a_group_is_coded_when_it_is_whole) {
  QuantizedKVCache cache({.method = "kivi", .head_dim = kDims, .residual_length = 0});
  const Vectors keys = normal_vectors(40, kDims, 1);
  cache.append(keys.data(), keys.data(), {}, 40);
  EXPECT_EQ(cache.n_exact(), 8);
}

TEST(QuantizedKVCacheKivi, the_newest_128_tokens_are_exact) {
  QuantizedKVCache cache({.method = "kivi", .head_dim = 128});
  Vectors keys = normal_vectors(512, 128, 1);
  const Vectors values = normal_vectors(512, 128, 2);
  cache.append(keys.data(), values.data(), {}, 128);
  const Vectors query = normal_vectors(1, 128, 3);
  const Vectors found = attend(cache, query);
  const auto exact = exact_attention(query.data(), keys.data(), values.data(), 0, 128, 128);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], exact[i], 1e-3);

  cache.append(keys.data() + 128 * 128, values.data() + 128 * 128, {}, 384);
  EXPECT_EQ(cache.n_exact(), 128);
  EXPECT_EQ(cache.memory_bytes(), 200 * 512);  // 96 bytes a coded token, 512 an exact one
}

TEST(QuantizedKVCacheKivi, numbers_past_half_floats_need_another_precision) {
  Vectors large(kDims, 1e5f);
  QuantizedKVCache half({.method = "kivi", .head_dim = kDims});
  EXPECT_EQ(refusal(half, [&] { half.append_key(large.data()); }),
            "[QuantizedKVCache::append_key] key must be within +-65504.000000 for precision fp16, "
            "got 100000.000000");
  for (const auto precision : {formats::Format::kBf16, formats::Format::kFp32}) {
    QuantizedKVCache cache({.method = "kivi", .head_dim = kDims, .precision = precision});
    for (int t = 0; t < 200; ++t) cache.append(large.data(), large.data(), {}, 1);
    const Vectors found = attend(cache, Vectors(kDims, 1e-6f));
    for (const float number : found) EXPECT_NEAR(number, 1e5f, 1e5f * 0x1p-8f);
  }
}

// Keys with some channels that are large for every token, as models have them.
class OutlierChannelsTest : public testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 200;

  KVCacheConfig config{.head_dim = kDims, .n_outlier_channels = 3, .n_calib_tokens = 50};
  Vectors keys = normal_vectors(2 * kTokens, kDims, 1);
  Vectors values = normal_vectors(2 * kTokens, kDims, 2);
  Vectors query = normal_vectors(2, kDims, 3);

  void SetUp() override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      // Others in the second head.
      const std::size_t channel = i % kDims;
      const bool second = i / kDims >= kTokens;
      if (channel % 11 == (second ? 4 : 2)) keys[i] += 12;
    }
  }

  double cosine_to_exact(const KVCacheConfig& with) const {
    QuantizedKVCache cache(with);
    cache.append(keys.data(), values.data(), {1, 2}, kTokens);
    const Vectors found = attend(cache, query, {.n_heads = 2});
    double sum = 0;
    for (std::int64_t head = 0; head < 2; ++head) {
      const std::int64_t first = head * kTokens;
      const auto exact = exact_attention(query.data() + head * kDims, keys.data() + first * kDims,
                                         values.data() + first * kDims, 0, kTokens, kDims);
      sum += cosine(found.data() + head * kDims, exact.data(), kDims) / 2;
    }
    return sum;
  }
};

TEST_F(OutlierChannelsTest, each_head_keeps_its_own_large_channels_apart) {
  KVCacheConfig without = config;
  without.n_outlier_channels = 0;
  EXPECT_GT(cosine_to_exact(config), cosine_to_exact(without) + 0.05);
  EXPECT_GT(cosine_to_exact(config), 0.9);
}

TEST_F(OutlierChannelsTest, they_are_chosen_by_the_first_tokens_however_those_came) {
  QuantizedKVCache at_once(config), one_by_one(config);
  at_once.append(keys.data(), values.data(), {}, kTokens);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    append_pairs(one_by_one, keys, values, t, t + 1);
    one_by_one.check_invariants();
    if (t + 1 < config.n_calib_tokens) {
      EXPECT_EQ(one_by_one.n_exact(), t + 1);
    }
  }
  const Vectors own(query.begin(), query.begin() + kDims);
  EXPECT_EQ(attend(one_by_one, own), attend(at_once, own));
  EXPECT_EQ(one_by_one.memory_bytes(), at_once.memory_bytes());
  // Channels 2, 13 and 24; what is not coded yet is exact.
  EXPECT_EQ(one_by_one.n_exact(), kTokens % 32);
}

TEST_F(OutlierChannelsTest, reset_forgets_the_channels) {
  QuantizedKVCache cache(config), fresh(config);
  cache.append(keys.data(), values.data(), {}, kTokens);
  cache.reset();
  const std::int64_t second = kTokens * kDims;
  for (QuantizedKVCache* either : {&cache, &fresh}) {
    either->append(keys.data() + second, values.data() + second, {}, kTokens);
  }
  const Vectors own(query.begin(), query.begin() + kDims);
  EXPECT_EQ(attend(cache, own), attend(fresh, own));
}

TEST(QuantizedKVCacheResidual, any_method_may_keep_its_newest_tokens_exact) {
  QuantizedKVCache cache({.head_dim = kDims, .residual_length = 64});
  const Vectors keys = normal_vectors(64, kDims, 1);
  cache.append(keys.data(), keys.data(), {}, 64);
  const Vectors query = normal_vectors(1, kDims, 3);
  const auto exact = exact_attention(query.data(), keys.data(), keys.data(), 0, 64, kDims);
  const Vectors found = attend(cache, query);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], exact[i], 1e-3);
}

}  // namespace
}  // namespace kvpool::methods
