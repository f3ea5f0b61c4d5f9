// Attention over pages of numbers and of codes, against decoding everything first.
#include "kvpool/methods/paged_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "kernels/paged_attention_common.h"
#include "kvpool/kernels/worker_pool.h"
#include "kvpool/methods/registry.h"
#include "vectors.h"

namespace kvpool::methods {
namespace {

using formats::Format;
using formats::PageLayout;
using kernels::PagedAttentionParams;
using kernels::PageRef;

/// fp32 results in another order; relative to outputs of about one.
constexpr double kRounding = 2e-5;
constexpr double kHalfRounding = 2e-2;

struct Shape {
  std::int64_t n_kv_heads = 2;
  std::int64_t group = 2;
  std::int64_t block_size = 32;
  std::int64_t head_dim = 64;
  std::int64_t n_queries = 1;
  std::vector<std::int64_t> lengths = {100};
};

/// Sequences in pages, and what the pages say as vectors.
class Paged {
 public:
  /// `coded(full page)` says whether a full page of keys or values is a codec's.
  Paged(const Method& method, const Shape& shape, unsigned seed,
        const std::function<bool(std::int64_t)>& coded)
      : method_(method), shape_(shape), random_(seed) {
    for (int stream = 0; stream < 2; ++stream) {
      const StreamCodec* codec = stream == 0 ? method.keys.get() : method.values.get();
      // The method outlives the test.
      heads_[stream].assign(index(shape.n_kv_heads), {std::shared_ptr<void>(), codec});
      head_bytes_[stream] = (codec->page_bytes(shape.block_size) + 1) / 2 * 2;
      std::int64_t n_full = 0;
      for (std::size_t b = 0; b < shape.lengths.size(); ++b) {
        vectors_[stream].emplace_back(index(shape.n_kv_heads * shape.lengths[b] * shape.head_dim));
        for (std::int64_t t = 0; t < shape.lengths[b]; t += shape.block_size) {
          const std::int64_t count = std::min(shape.block_size, shape.lengths[b] - t);
          const bool is_coded = count == shape.block_size && coded(n_full++);
          add_page(stream, b, t, count, *codec, is_coded);
        }
      }
    }
    indptr_.push_back(0);
    for (const std::int64_t length : shape.lengths) {
      const std::int64_t n_pages = (length + shape.block_size - 1) / shape.block_size;
      indptr_.push_back(indptr_.back() + static_cast<std::int32_t>(n_pages));
      last_page_len_.push_back(
          static_cast<std::int32_t>(length - (n_pages - 1) * shape.block_size));
    }
    const std::int64_t n_rows = static_cast<std::int64_t>(shape.lengths.size()) * shape.n_kv_heads *
                                shape.group * shape.n_queries;
    queries_ = normal_vectors(n_rows, shape.head_dim, seed + 1);
  }

  PagedAttentionParams params() const {
    PagedAttentionParams p;
    p.batch = static_cast<std::int64_t>(shape_.lengths.size());
    p.n_q_heads = shape_.n_kv_heads * shape_.group;
    p.n_queries = shape_.n_queries;
    p.queries = queries_.data();
    const std::int64_t strides[] = {p.n_q_heads * p.n_queries * shape_.head_dim,
                                    p.n_queries * shape_.head_dim, shape_.head_dim};
    std::copy_n(strides, 3, p.q_strides);
    std::copy_n(strides, 3, p.out_strides);
    const formats::PageShape page{shape_.n_kv_heads, shape_.block_size, shape_.head_dim};
    p.keys = {refs_[0].data(), static_cast<std::int64_t>(refs_[0].size()), page};
    p.values = {refs_[1].data(), static_cast<std::int64_t>(refs_[1].size()), page};
    p.indptr = indptr_.data();
    p.last_page_len = last_page_len_.data();
    p.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
    return p;
  }

  PageCodecs key_codecs() const { return {heads_[0], head_bytes_[0]}; }
  PageCodecs value_codecs() const { return {heads_[1], head_bytes_[1]}; }

  std::size_t n_outputs() const { return queries_.size(); }

  /// Attention over the decoded vectors in double precision.
  std::vector<double> expected(const PagedAttentionParams& p) const {
    std::vector<double> out(n_outputs());
    const std::int64_t dims = shape_.head_dim;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const std::int64_t n_tokens = shape_.lengths[index(b)];
      for (std::int64_t h = 0; h < p.n_q_heads; ++h) {
        const std::int64_t at = h / shape_.group * n_tokens * dims;
        const float* keys = vectors_[0][index(b)].data() + at;
        const float* values = vectors_[1][index(b)].data() + at;
        for (std::int64_t i = 0; i < p.n_queries; ++i) {
          const std::int64_t row = (b * p.n_q_heads + h) * p.n_queries + i;
          std::vector<float> query(index(dims));
          read_query(p, b, h, i, query.data());
          const kernels::TokenRange seen = visible(p, n_tokens, i);
          std::vector<double> scores;
          double largest = p.sinks ? static_cast<double>(p.sinks[h]) : -1e300;
          for (std::int64_t t = seen.first; t < seen.last; ++t) {
            const double score = inner(query.data(), keys + t * dims, dims);
            const float biased =
                masked(p, b, h, i, t, static_cast<float>(score * static_cast<double>(p.scale)));
            scores.push_back(static_cast<double>(biased));
            largest = std::max(largest, scores.back());
          }
          double total = p.sinks ? std::exp(static_cast<double>(p.sinks[h]) - largest) : 0;
          std::vector<double> sum(index(dims));
          bool any = false;
          for (std::size_t t = 0; t < scores.size(); ++t) {
            if (std::isinf(scores[t])) continue;
            any = true;
            const double weight = std::exp(scores[t] - largest);
            total += weight;
            const float* value = values + (seen.first + static_cast<std::int64_t>(t)) * dims;
            for (std::size_t j = 0; j < sum.size(); ++j) {
              sum[j] += weight * static_cast<double>(value[j]);
            }
          }
          for (std::size_t j = 0; any && j < sum.size(); ++j) {
            out[index(row * dims) + j] = sum[j] / total;
          }
        }
      }
    }
    return out;
  }

  static std::size_t index(std::int64_t n) { return static_cast<std::size_t>(n); }

 private:
  void add_page(int stream, std::size_t b, std::int64_t first, std::int64_t count,
                const StreamCodec& codec, bool is_coded) {
    static constexpr Format kExact[] = {Format::kFp16, Format::kFp32, Format::kBf16, Format::kInt8};
    const std::int64_t dims = shape_.head_dim;
    const Format format = kExact[random_() % 4];
    const PageLayout layout{format, {shape_.n_kv_heads, shape_.block_size, dims}};
    const std::int64_t bytes =
        is_coded ? shape_.n_kv_heads * head_bytes_[stream] : layout.page_bytes();
    // What is not written is NaN in every float format.
    auto page = std::make_unique<std::byte[]>(index(bytes));
    std::memset(page.get(), 0xff, index(bytes));
    for (std::int64_t h = 0; h < shape_.n_kv_heads; ++h) {
      const Vectors numbers = normal_vectors(count, dims, static_cast<unsigned>(random_()));
      float* out = vectors_[stream][b].data() + (h * shape_.lengths[b] + first) * dims;
      if (!is_coded) {
        formats::encode_tokens(layout, page.get(), h, 0, count, numbers.data(), dims);
        formats::decode_tokens(layout, page.get(), h, 0, count, out, dims);
        continue;
      }
      const Page coded{page.get() + h * head_bytes_[stream], shape_.block_size};
      Vectors scratch(index(codec.scratch_floats(count)));
      codec.encode(numbers.data(), dims, {0, count}, coded, scratch.data());
      const std::int64_t stride = kernels::padded_row(codec.code_dims());
      Vectors rows(index(count * stride));
      codec.decode(coded, {0, count}, kernels::scalar_row_kernels(), {rows.data(), stride},
                   scratch.data());
      for (std::int64_t t = 0; t < count; ++t)
        codec.leave(rows.data() + t * stride, out + t * dims);
    }
    refs_[stream].push_back({page.get(), is_coded ? kCodecPage : format});
    pages_.push_back(std::move(page));
  }

  const Method& method_;
  Shape shape_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<std::byte[]>> pages_;
  std::vector<PageRef> refs_[2];
  std::vector<std::shared_ptr<const StreamCodec>> heads_[2];
  std::int64_t head_bytes_[2] = {};
  /// Of each sequence: [n_kv_heads, n_tokens, head_dim].
  std::vector<Vectors> vectors_[2];
  std::vector<std::int32_t> indptr_;
  std::vector<std::int32_t> last_page_len_;
  Vectors queries_;
};

Vectors attend(const Paged& paged, PagedAttentionParams p, kernels::WorkerPool* workers = nullptr,
               const kernels::RowKernels& kernels = kernels::row_kernels()) {
  Vectors out(paged.n_outputs(), std::numeric_limits<float>::quiet_NaN());
  p.output = out.data();
  const std::size_t bytes = paged_attention_scratch_bytes(
      p, paged.key_codecs(), paged.value_codecs(), workers ? workers->n_threads() : 1);
  // Scratch comes as it is.
  std::vector<float> scratch(bytes / sizeof(float), std::numeric_limits<float>::quiet_NaN());
  paged_attention(p, paged.key_codecs(), paged.value_codecs(),
                  reinterpret_cast<std::byte*>(scratch.data()), workers, kernels);
  return out;
}

void expect_near(const Vectors& found, const std::vector<double>& expected,
                 double most = kRounding) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(found[i]), expected[i], most) << "number " << i;
  }
}

bool always(std::int64_t) { return true; }
bool never(std::int64_t) { return false; }

class PagedMethodTest : public testing::TestWithParam<std::string> {
 protected:
  std::shared_ptr<const Method> method(std::int64_t head_dim = 64) const {
    return make_method({.method = GetParam(), .head_dim = head_dim});
  }
};

TEST_P(PagedMethodTest, equals_decoding_everything_first) {
  const auto codecs = method();
  for (const auto& kinds :
       {std::function<bool(std::int64_t)>(always), std::function<bool(std::int64_t)>(never)}) {
    const Paged paged(*codecs, {.lengths = {1, 32, 77, 700}}, 1, kinds);
    const PagedAttentionParams p = paged.params();
    expect_near(attend(paged, p), paged.expected(p));
  }
}

// Every choice at random: shapes, which pages are coded, what is seen.
TEST_P(PagedMethodTest, follows_the_oracle_over_random_shapes_mixes_and_masks) {
  std::mt19937 random(7);
  const auto pick = [&](std::initializer_list<std::int64_t> from) {
    return from.begin()[random() % from.size()];
  };
  for (int round = 0; round < 30; ++round) {
    const std::int64_t head_dim = pick({16, 64, 80, 128});
    const auto codecs = method(head_dim);
    const std::int64_t group = codecs->keys->group();
    Shape shape{.n_kv_heads = pick({1, 2, 3}),
                .group = pick({1, 2, 4}),
                .block_size = group > 1 ? group * pick({1, 2}) : pick({1, 8, 16, 32, 64}),
                .head_dim = head_dim,
                .n_queries = pick({1, 1, 3, 40}),
                .lengths = {}};
    for (std::int64_t b = pick({1, 2, 3}); b > 0; --b) {
      shape.lengths.push_back(pick({1, 2, 31, 32, 33, 100, 300, 600}));
    }
    const unsigned salt = static_cast<unsigned>(random());
    const Paged paged(*codecs, shape, salt, [&](std::int64_t) { return random() % 3 != 0; });
    PagedAttentionParams p = paged.params();
    p.causal = random() % 2 == 0;
    p.window = pick({0, 0, 1, 20, 200});
    Vectors sinks(Paged::index(p.n_q_heads), 0.5f);
    if (random() % 3 == 0) p.sinks = sinks.data();
    const std::int64_t longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
    Vectors mask = normal_vectors(p.n_queries, longest, salt);
    std::vector<std::uint8_t> shown(mask.size());
    for (std::size_t i = 0; i < mask.size(); ++i) {
      shown[i] = mask[i] > 0;
      if (mask[i] > 1) mask[i] = -std::numeric_limits<float>::infinity();
    }
    p.mask_strides[2] = longest;
    p.mask_strides[3] = 1;
    switch (random() % 3) {
      case 0:
        p.mask = mask.data();
        p.mask_kind = kernels::MaskKind::kFp32;
        break;
      case 1:
        p.mask = shown.data();
        p.mask_kind = kernels::MaskKind::kBoolean;
        break;
      default:
        break;
    }
    SCOPED_TRACE("round " + std::to_string(round));
    const Vectors found = attend(paged, p);
    expect_near(found, paged.expected(p));
    kernels::WorkerPool two(2), three(3);
    for (kernels::WorkerPool* workers : {&two, &three}) {
      const Vectors again = attend(paged, p, workers);
      ASSERT_EQ(std::memcmp(found.data(), again.data(), found.size() * sizeof(float)), 0);
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(PagedMethodTest, every_target_agrees) {
  const auto codecs = method(80);
  const Paged paged(*codecs, {.head_dim = 80, .n_queries = 3, .lengths = {200, 65}}, 3,
                    [](std::int64_t page) { return page % 2 == 0; });
  PagedAttentionParams p = paged.params();
  p.causal = true;
  for (const kernels::RowKernels& kernels : kernels::all_row_kernels()) {
    SCOPED_TRACE(kernels.target);
    expect_near(attend(paged, p, nullptr, kernels), paged.expected(p));
  }
}

TEST_P(PagedMethodTest, a_sequence_has_the_same_bits_alone_and_in_a_batch) {
  const auto codecs = method();
  const Paged paged(*codecs, {.lengths = {900, 40, 333}}, 4, always);
  const PagedAttentionParams batch = paged.params();
  kernels::WorkerPool workers(2);
  const Vectors together = attend(paged, batch, &workers);
  const std::int64_t numbers = batch.q_strides[0];
  for (std::int64_t b = 0; b < batch.batch; ++b) {
    PagedAttentionParams alone = batch;
    alone.batch = 1;
    alone.queries = static_cast<const float*>(batch.queries) + b * numbers;
    alone.indptr = batch.indptr + b;
    alone.last_page_len = batch.last_page_len + b;
    const Vectors found = attend(paged, alone);
    EXPECT_EQ(std::memcmp(found.data(), together.data() + b * numbers,
                          Paged::index(numbers) * sizeof(float)),
              0)
        << "sequence " << b;
  }
}

TEST_P(PagedMethodTest, many_queries_answer_like_each_alone) {
  const auto codecs = method();
  const Paged paged(*codecs, {.group = 4, .n_queries = 70, .lengths = {150}}, 5, always);
  PagedAttentionParams p = paged.params();
  p.causal = true;
  const Vectors found = attend(paged, p);
  expect_near(found, paged.expected(p));
  kernels::WorkerPool workers(2);
  const Vectors again = attend(paged, p, &workers);
  EXPECT_EQ(std::memcmp(found.data(), again.data(), found.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(methods, PagedMethodTest, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const MethodInfo& row : methods()) names.emplace_back(row.name);
                           return names;
                         }()),
                         [](const auto& name) { return name.param; });

TEST(PagedMethods, a_query_that_sees_nothing_gets_zeros) {
  const auto codecs = make_method({.head_dim = 64});
  const Paged paged(*codecs, {.n_queries = 4, .lengths = {2}}, 6, never);
  PagedAttentionParams p = paged.params();
  p.causal = true;  // the first two queries stand before the first token
  const Vectors found = attend(paged, p);
  expect_near(found, paged.expected(p));
  EXPECT_EQ(found[0], 0);
}

TEST(PagedMethods, half_precision_queries_get_half_precision_outputs) {
  const auto codecs = make_method({.head_dim = 64});
  const Paged paged(*codecs, {.lengths = {90}}, 7, always);
  PagedAttentionParams p = paged.params();
  std::vector<std::uint16_t> queries(paged.n_outputs());
  for (std::size_t i = 0; i < queries.size(); ++i) {
    queries[i] = float_to_half(static_cast<const float*>(p.queries)[i]);
  }
  const std::vector<double> expected = paged.expected(p);
  p.query_format = Format::kFp16;
  p.queries = queries.data();
  std::vector<std::uint16_t> out(queries.size());
  p.output = out.data();
  std::vector<float> scratch(
      paged_attention_scratch_bytes(p, paged.key_codecs(), paged.value_codecs(), 1) /
      sizeof(float));
  paged_attention(p, paged.key_codecs(), paged.value_codecs(),
                  reinterpret_cast<std::byte*>(scratch.data()), nullptr);
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(half_to_float(out[i])), expected[i], kHalfRounding);
  }
}

}  // namespace
}  // namespace kvpool::methods
