#include "kvpool/cache/paged_sequence.h"

#include <cmath>
#include <random>

#include "paged_fixture.h"

namespace kvpool::cache::testing {
namespace {

using ::testing::HasSubstr;
using Matrix = std::vector<float>;  // rows of one head after another

constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kQueryHeads = 4;
constexpr std::int64_t kKeyDim = 8;
constexpr std::int64_t kValueDim = 4;

Matrix random_rows(std::mt19937& random, std::int64_t heads, std::int64_t n, std::int64_t dim) {
  std::normal_distribution<float> normal;
  Matrix rows(static_cast<std::size_t>(heads * n * dim));
  for (float& number : rows) number = normal(random);
  return rows;
}

kernels::SourceRows source(const Matrix& rows, std::int64_t n, std::int64_t dim) {
  return {reinterpret_cast<const std::byte*>(rows.data()), Format::kFp32, n * dim, dim};
}

/// A sequence beside the dense keys and values of each of its layers: [token][head][dim].
struct Pair {
  PagedSequence sequence;
  std::vector<Matrix> keys;
  std::vector<Matrix> values;

  void step(std::mt19937& random, std::int64_t n) {
    for (std::int64_t layer = 0; layer < sequence.n_layers(); ++layer) {
      const Matrix k = random_rows(random, kHeads, n, kKeyDim);
      const Matrix v = random_rows(random, kHeads, n, kValueDim);
      sequence.append(layer, n, source(k, n, kKeyDim), source(v, n, kValueDim));
      const auto add = [n](Matrix& dense, const Matrix& rows, std::int64_t dim) {
        for (std::int64_t t = 0; t < n; ++t) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            const auto row = rows.begin() + (h * n + t) * dim;
            dense.insert(dense.end(), row, row + dim);
          }
        }
      };
      add(keys[static_cast<std::size_t>(layer)], k, kKeyDim);
      add(values[static_cast<std::size_t>(layer)], v, kValueDim);
    }
  }

  /// The largest difference to attention over the dense rows.
  double error(std::mt19937& random, std::int64_t layer, std::int64_t n_queries) {
    const Matrix queries = random_rows(random, kQueryHeads, n_queries, kKeyDim);
    Matrix output(static_cast<std::size_t>(kQueryHeads * n_queries * kValueDim));
    sequence.attend(layer, kQueryHeads, n_queries, source(queries, n_queries, kKeyDim),
                    {reinterpret_cast<std::byte*>(output.data()), Format::kFp32,
                     n_queries * kValueDim, kValueDim});
    const Matrix& k = keys[static_cast<std::size_t>(layer)];
    const Matrix& v = values[static_cast<std::size_t>(layer)];
    const auto n = static_cast<std::int64_t>(k.size()) / (kHeads * kKeyDim);
    const std::int64_t window = sequence.layer(layer).spec().window;
    double worst = 0;
    for (std::int64_t h = 0; h < kQueryHeads; ++h) {
      const std::int64_t kv = h / (kQueryHeads / kHeads);
      for (std::int64_t i = 0; i < n_queries; ++i) {
        const std::int64_t position = n - n_queries + i;
        double sum = 0;
        double mean[kValueDim] = {};
        for (std::int64_t t = window == 0 ? 0 : std::max<std::int64_t>(0, position - window + 1);
             t <= position; ++t) {
          double score = 0;
          for (std::int64_t d = 0; d < kKeyDim; ++d) {
            score += queries[static_cast<std::size_t>((h * n_queries + i) * kKeyDim + d)] *
                     k[static_cast<std::size_t>((t * kHeads + kv) * kKeyDim + d)];
          }
          const double weight = std::exp(score / std::sqrt(double{kKeyDim}));
          sum += weight;
          for (std::int64_t d = 0; d < kValueDim; ++d) {
            mean[d] += weight * v[static_cast<std::size_t>((t * kHeads + kv) * kValueDim + d)];
          }
        }
        for (std::int64_t d = 0; d < kValueDim; ++d) {
          const double got = output[static_cast<std::size_t>((h * n_queries + i) * kValueDim + d)];
          worst = std::max(worst, std::abs(got - mean[d] / sum));
        }
      }
    }
    return worst;
  }
};

Pair make_both(const std::shared_ptr<PagedPool>& pool, std::int64_t window = 0) {
  PagedLayerSpec spec = small_spec();
  spec.window = window;
  return {PagedSequence(pool, 1, spec, 2), std::vector<Matrix>(2), std::vector<Matrix>(2)};
}

constexpr double kTolerance = 1e-5;

TEST(PagedSequence, attends_as_over_dense_rows_step_by_step) {
  std::mt19937 random(1);
  const auto pool = make_pool(128, 4);
  Pair pair = make_both(pool);
  pair.step(random, 13);
  EXPECT_LT(pair.error(random, 0, 13), kTolerance);
  for (int i = 0; i < 20; ++i) {
    pair.step(random, 1);
    for (std::int64_t layer : {0, 1}) EXPECT_LT(pair.error(random, layer, 1), kTolerance);
  }
}

TEST(PagedSequence, attends_behind_a_window) {
  std::mt19937 random(2);
  const auto pool = make_pool(64, 4);
  Pair pair = make_both(pool, 6);
  pair.step(random, 9);
  for (int i = 0; i < 30; ++i) {
    const std::int64_t n = 1 + i % 3;
    pair.step(random, n);
    EXPECT_LT(pair.error(random, 1, n), kTolerance);
  }
  EXPECT_LE(pair.sequence.group().n_blocks(), 2 * 2 * 4);
}

TEST(PagedSequence, forks_go_their_own_ways_and_trims_come_back) {
  std::mt19937 random(3);
  const auto pool = make_pool(128, 4);
  Pair pair = make_both(pool);
  pair.step(random, 10);
  Pair copy{pair.sequence.fork(), pair.keys, pair.values};
  copy.step(random, 3);
  pair.step(random, 2);
  EXPECT_EQ(pair.sequence.trim(5), 5);
  for (int layer = 0; layer < 2; ++layer) {
    pair.keys[static_cast<std::size_t>(layer)].resize(7 * kHeads * kKeyDim);
    pair.values[static_cast<std::size_t>(layer)].resize(7 * kHeads * kValueDim);
  }
  pair.step(random, 4);
  EXPECT_LT(pair.error(random, 1, 2), kTolerance);
  EXPECT_LT(copy.error(random, 1, 2), kTolerance);
  EXPECT_EQ(copy.sequence.length(), 13);
  pair.sequence.release();
  EXPECT_LT(copy.error(random, 0, 1), kTolerance);
  check_all(*pool);
}

TEST(PagedSequence, bad_arguments_are_refused_before_anything_moves) {
  const auto pool = make_pool(32, 4);
  PagedSequence sequence(pool, 1, small_spec(), 2);
  const auto message_of = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  const Matrix rows(64, 0.5f);
  Matrix out(64);
  const auto keys = source(rows, 1, kKeyDim);
  const auto values = source(rows, 1, kValueDim);
  auto codes = keys;
  codes.format = Format::kInt8;
  const kernels::TargetRows output{reinterpret_cast<std::byte*>(out.data()), Format::kFp32,
                                   kValueDim, kValueDim};
  EXPECT_EQ(message_of([&] { sequence.append(2, 1, keys, values); }),
            "[PagedSequence::layer] index must be in 0..1, got 2");
  EXPECT_EQ(message_of([&] { sequence.append(0, 1, codes, values); }),
            "[PagedSequence::append] keys must be fp32, fp16 or bf16, got int8");
  EXPECT_EQ(sequence.length(), 0);
  sequence.append(0, 1, keys, values);
  EXPECT_EQ(message_of([&] { sequence.attend(0, 3, 1, keys, output); }),
            "[PagedSequence::attend] n_q_heads must be a multiple of the 2 kv heads, got 3");
  EXPECT_EQ(message_of([&] { sequence.attend(0, 2, 2, keys, output); }),
            "[PagedSequence::attend] n_queries must be in 1..1, got 2");
  EXPECT_THAT(message_of([&] { PagedSequence(pool, 1, small_spec(), 0); }),
              HasSubstr("n_layers must be >= 1, got 0"));
}

}  // namespace
}  // namespace kvpool::cache::testing
