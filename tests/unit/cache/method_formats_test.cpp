// The quantised-cache methods as formats of paged layers.
#include "kvpool/cache/method_formats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cache/attend_pages.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/paged_layer.h"
#include "kvpool/cache/paged_pool.h"
#include "kvpool/kernels/worker_pool.h"
#include "kvpool/methods/registry.h"

namespace kvpool::cache {
namespace {

using formats::Format;
using methods::Method;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kDims = 64;
constexpr std::int64_t kBlock = 32;
constexpr double kRounding = 2e-5;

/// [kHeads, n_tokens, kDims] normal numbers.
std::vector<float> numbers(std::int64_t n_tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<std::size_t>(kHeads * n_tokens * kDims));
  for (float& number : out) number = normal(random);
  return out;
}

class MethodLayer {
 public:
  MethodLayer(const std::shared_ptr<const Method>& method, Format recent = Format::kFp32)
      : pool_(std::make_shared<PagedPool>(std::make_shared<core::BlockPoolAllocator>(
            core::PoolConfig{.block_size = kBlock, .n_blocks = 256}))),
        group_(std::make_shared<PagedGroup>(pool_, OwnerId{1})),
        layer_(group_->add_layer({kHeads, kDims, kDims, method_keys(method, kHeads, kBlock, recent),
                                  method_values(method, kHeads, kBlock, recent)})) {}

  /// Tokens first .. first + count of `keys` and `values`, of n_tokens each.
  void append(const std::vector<float>& keys, const std::vector<float>& values,
              std::int64_t n_tokens, std::int64_t first, std::int64_t count) {
    const auto rows = [&](const std::vector<float>& from) {
      return kernels::SourceRows{reinterpret_cast<const std::byte*>(from.data() + first * kDims),
                                 Format::kFp32, n_tokens * kDims, kDims};
    };
    layer_->append(count)->run(rows(keys), rows(values));
  }

  PagedLayer& layer() { return *layer_; }
  std::shared_ptr<const PageView> view() const { return layer_->view(); }

  /// Numbers as the pages say them: [kHeads, length, kDims].
  std::vector<float> read(bool keys) const {
    const auto view = layer_->view();
    const std::int64_t length = view->length();
    std::vector<float> out(static_cast<std::size_t>(kHeads * length * kDims));
    for (std::int64_t head = 0; head < kHeads; ++head) {
      float* rows = out.data() + head * length * kDims;
      if (keys) {
        view->read_keys(head, 0, length, rows, kDims);
      } else {
        view->read_values(head, 0, length, rows, kDims);
      }
    }
    return out;
  }

  /// One query a head over everything.
  std::vector<float> attend(const std::vector<float>& queries,
                            kernels::WorkerPool* workers = nullptr) const {
    const auto view = layer_->view();
    kernels::PagedAttentionParams p;
    p.queries = queries.data();
    p.keys = {view->keys().pages.data(), view->n_pages(), view->keys().layout->shape()};
    p.values = {view->values().pages.data(), view->n_pages(), view->values().layout->shape()};
    p.batch = 1;
    p.n_q_heads = kHeads;
    p.n_queries = 1;
    const std::int64_t strides[] = {kHeads * kDims, kDims, kDims};
    std::copy_n(strides, 3, p.q_strides);
    std::copy_n(strides, 3, p.out_strides);
    const std::int32_t indptr[] = {0, static_cast<std::int32_t>(view->n_pages())};
    const auto last = static_cast<std::int32_t>(view->last_page_len());
    p.indptr = indptr;
    p.last_page_len = &last;
    p.scale = 0.125f;
    std::vector<float> out(static_cast<std::size_t>(kHeads * kDims));
    p.output = out.data();
    const StreamLayout& keys = *view->keys().layout;
    const StreamLayout& values = *view->values().layout;
    std::vector<float> scratch(
        attend_pages_scratch_bytes(p, keys, values, workers ? workers->n_threads() : 1) /
        sizeof(float));
    attend_pages(p, keys, values, reinterpret_cast<std::byte*>(scratch.data()), workers);
    return out;
  }

 private:
  std::shared_ptr<PagedPool> pool_;
  std::shared_ptr<PagedGroup> group_;
  std::unique_ptr<PagedLayer> layer_;
};

/// softmax(q K / 8) V in double precision.
std::vector<double> attention(const std::vector<float>& queries, const std::vector<float>& keys,
                              const std::vector<float>& values) {
  const auto n_tokens = static_cast<std::int64_t>(keys.size()) / (kHeads * kDims);
  std::vector<double> out(static_cast<std::size_t>(kHeads * kDims));
  for (std::int64_t head = 0; head < kHeads; ++head) {
    std::vector<double> weights;
    double total = 0;
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      double score = 0;
      for (std::int64_t j = 0; j < kDims; ++j) {
        score +=
            static_cast<double>(queries[static_cast<std::size_t>(head * kDims + j)]) *
            static_cast<double>(keys[static_cast<std::size_t>((head * n_tokens + t) * kDims + j)]);
      }
      weights.push_back(std::exp(score / 8));
      total += weights.back();
    }
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      for (std::int64_t j = 0; j < kDims; ++j) {
        out[static_cast<std::size_t>(head * kDims + j)] +=
            weights[static_cast<std::size_t>(t)] / total *
            static_cast<double>(
                values[static_cast<std::size_t>((head * n_tokens + t) * kDims + j)]);
      }
    }
  }
  return out;
}

class MethodFormatsTest : public testing::TestWithParam<std::string> {
 protected:
  std::shared_ptr<const Method> method(std::int64_t residual = 0) const {
    return methods::make_method({.method = GetParam(),
                                 .head_dim = kDims,
                                 .bit_width_inlier = 3,
                                 .residual_length = residual});
  }
};

TEST_P(MethodFormatsTest, full_blocks_are_codes_and_the_rest_is_exact) {
  constexpr std::int64_t kTokens = 100;
  const auto keys = numbers(kTokens, 1), values = numbers(kTokens, 2);
  MethodLayer layer(method());
  layer.append(keys, values, kTokens, 0, kTokens);
  const auto view = layer.view();
  for (const auto& stream : {view->keys(), view->values()}) {
    ASSERT_EQ(stream.pages.size(), 4u);
    for (std::size_t page = 0; page < 3; ++page) {
      EXPECT_EQ(stream.pages[page].format, kCodecPage);
    }
    EXPECT_EQ(stream.pages[3].format, Format::kFp32);
  }
  // The last four tokens are as they came.
  const auto read = layer.read(true);
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const std::int64_t at = (head * kTokens + 96) * kDims;
    EXPECT_EQ(std::memcmp(read.data() + at, keys.data() + at, 4 * kDims * sizeof(float)), 0);
  }
}

TEST_P(MethodFormatsTest, attention_is_that_over_the_decoded_pages) {
  constexpr std::int64_t kTokens = 400;
  const auto keys = numbers(kTokens, 3), values = numbers(kTokens, 4);
  const auto queries = numbers(1, 5);
  MethodLayer layer(method());
  layer.append(keys, values, kTokens, 0, kTokens);
  const auto found = layer.attend(queries);
  const auto expected = attention(queries, layer.read(true), layer.read(false));
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(found[i]), expected[i], kRounding) << i;
  }
  kernels::WorkerPool workers(2);
  const auto again = layer.attend(queries, &workers);
  EXPECT_EQ(std::memcmp(found.data(), again.data(), found.size() * sizeof(float)), 0);
}

TEST_P(MethodFormatsTest, field_G3_pages_do_not_depend_on_how_appends_were_cut) {
  constexpr std::int64_t kTokens = 150;
  const auto keys = numbers(kTokens, 6), values = numbers(kTokens, 7);
  MethodLayer whole(method(), Format::kFp16);
  whole.append(keys, values, kTokens, 0, kTokens);
  std::mt19937 random(8);
  MethodLayer cut(method(), Format::kFp16);
  for (std::int64_t done = 0; done < kTokens;) {
    const std::int64_t count =
        std::min<std::int64_t>(kTokens - done, 1 + static_cast<std::int64_t>(random() % 40));
    cut.append(keys, values, kTokens, done, count);
    done += count;
  }
  EXPECT_EQ(whole.read(true), cut.read(true));
  EXPECT_EQ(whole.read(false), cut.read(false));
  EXPECT_EQ(whole.layer().nbytes(), cut.layer().nbytes());
}

TEST_P(MethodFormatsTest, an_exact_window_keeps_its_blocks) {
  constexpr std::int64_t kTokens = 256;
  const auto keys = numbers(kTokens, 9), values = numbers(kTokens, 10);
  MethodLayer layer(method(64));
  layer.append(keys, values, kTokens, 0, kTokens);
  std::size_t n_coded = 0;
  const auto view = layer.view();
  for (const auto& page : view->keys().pages) n_coded += page.format == kCodecPage;
  EXPECT_EQ(n_coded, 6u);
}

TEST_P(MethodFormatsTest, trimming_into_codes_goes_on_from_what_they_say) {
  constexpr std::int64_t kTokens = 96;
  const auto keys = numbers(kTokens, 11), values = numbers(kTokens, 12);
  MethodLayer layer(method());
  layer.append(keys, values, kTokens, 0, 70);
  EXPECT_EQ(layer.layer().trim(20), 20);
  const auto before = layer.read(true);
  layer.append(keys, values, kTokens, 50, 5);
  EXPECT_EQ(layer.layer().offset(), 55);
  const auto after = layer.read(true);
  for (std::int64_t head = 0; head < kHeads; ++head) {
    EXPECT_EQ(std::memcmp(after.data() + head * 55 * kDims, before.data() + head * 50 * kDims,
                          50 * kDims * sizeof(float)),
              0);
    EXPECT_EQ(std::memcmp(after.data() + (head * 55 + 50) * kDims,
                          keys.data() + (head * kTokens + 50) * kDims, 5 * kDims * sizeof(float)),
              0);
  }
}

INSTANTIATE_TEST_SUITE_P(methods, MethodFormatsTest, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& row : methods::methods()) names.emplace_back(row.name);
                           return names;
                         }()),
                         [](const auto& name) { return name.param; });

TEST(MethodFormats, kivi_needs_blocks_of_whole_groups) {
  const auto kivi = methods::make_method({.method = "kivi", .head_dim = kDims});
  EXPECT_THAT(
      [&] { method_keys(kivi, 2, 16, Format::kFp16); },
      ThrowsMessage<InvalidArgument>(HasSubstr("block_size must be a multiple of the 32 tokens")));
  EXPECT_EQ(method_keys(kivi, 2, 64, Format::kFp16).tiers.at(0).after_tokens, 128);
}

TEST(MethodFormats, a_stream_has_one_codec) {
  const auto wide = methods::make_method({.head_dim = kDims, .bit_width_inlier = 4});
  const auto narrow = methods::make_method({.head_dim = kDims, .bit_width_inlier = 2});
  StreamFormat format = method_keys(wide, kHeads, kBlock, Format::kFp16);
  format.tiers.push_back(method_keys(narrow, kHeads, kBlock, Format::kFp16).tiers[0]);
  format.tiers[1].after_tokens = 100;
  EXPECT_THAT([&] { StreamLayout(format, {kHeads, kBlock, kDims}, "keys"); },
              ThrowsMessage<InvalidArgument>(HasSubstr("keys tiers must have at most one codec")));
}

TEST(MethodFormats, the_stream_beside_a_codec_is_no_wider_than_its_attention) {
  const auto method = methods::make_method({.head_dim = kDims});
  const auto pool = std::make_shared<PagedPool>(std::make_shared<core::BlockPoolAllocator>(
      core::PoolConfig{.block_size = kBlock, .n_blocks = 4}));
  const auto group = std::make_shared<PagedGroup>(pool, OwnerId{1});
  PagedLayerSpec spec{kHeads, kDims, 1025, method_keys(method, kHeads, kBlock, Format::kFp16), {}};
  EXPECT_THAT([&] { group->add_layer(spec); },
              ThrowsMessage<InvalidArgument>(HasSubstr("value_dim must be <= 1024")));
  spec.value_dim = 1024;
  EXPECT_NO_THROW(group->add_layer(spec));
}

TEST(MethodFormats, what_pages_cannot_do_is_refused_by_name) {
  const auto with_outliers = methods::make_method({.head_dim = kDims, .n_outlier_channels = 2});
  EXPECT_THAT([&] { method_keys(with_outliers, 2, 16, Format::kFp16); },
              ThrowsMessage<InvalidArgument>(HasSubstr("n_outlier_channels must be 0 in pages")));
  const auto ring = methods::make_method({.head_dim = kDims, .capacity = 100});
  EXPECT_THAT([&] { method_values(ring, 2, 16, Format::kFp16); },
              ThrowsMessage<InvalidArgument>(HasSubstr("capacity must be None in pages, got 100")));
  EXPECT_THROW(method_keys(nullptr, 2, 16, Format::kFp16), InvalidArgument);
}

}  // namespace
}  // namespace kvpool::cache
