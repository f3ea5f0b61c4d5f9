#include "kvpool/methods/linear_map.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "vectors.h"

namespace kvpool::methods {
namespace {

constexpr double kTolerance = 1e-5;

std::vector<float> column(const LinearMap& map, std::int64_t j) {
  std::vector<float> unit(static_cast<std::size_t>(map.columns()));
  unit[static_cast<std::size_t>(j)] = 1;
  std::vector<float> out(static_cast<std::size_t>(map.rows()));
  map.apply(unit.data(), out.data());
  return out;
}

/// FNV-1a over the bits of numbers.
std::uint64_t fingerprint(const std::vector<float>& numbers) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const float number : numbers) {
    hash = (hash ^ std::bit_cast<std::uint32_t>(number)) * 0x100000001b3u;
  }
  return hash;
}

struct RotationCase {
  std::int64_t dims;
  RotationKind kind;
};
class RotationTest : public testing::TestWithParam<RotationCase> {};

TEST_P(RotationTest, columns_are_orthonormal) {
  const auto [dims, kind] = GetParam();
  const auto rotation = make_rotation(dims, 3, kind);
  std::vector<std::vector<float>> columns;
  for (std::int64_t j = 0; j < dims; ++j) columns.push_back(column(*rotation, j));
  for (std::int64_t i = 0; i < dims; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      EXPECT_NEAR(inner(columns[static_cast<std::size_t>(i)].data(),
                        columns[static_cast<std::size_t>(j)].data(), dims),
                  i == j, kTolerance);
    }
  }
}

TEST_P(RotationTest, transposed_undoes_it) {
  const auto [dims, kind] = GetParam();
  const auto rotation = make_rotation(dims, 3, kind);
  const Vectors vector = normal_vectors(1, dims, 5);
  Vectors turned(vector.size()), back(vector.size());
  rotation->apply(vector.data(), turned.data());
  rotation->apply_transposed(turned.data(), back.data());
  for (std::size_t i = 0; i < vector.size(); ++i) EXPECT_NEAR(back[i], vector[i], kTolerance);
}

TEST_P(RotationTest, seeds_give_different_rotations) {
  const auto [dims, kind] = GetParam();
  EXPECT_NE(column(*make_rotation(dims, 1, kind), 0), column(*make_rotation(dims, 3, kind), 0));
  EXPECT_EQ(column(*make_rotation(dims, 1, kind), 0), column(*make_rotation(dims, 1, kind), 0));
}

INSTANTIATE_TEST_SUITE_P(dims, RotationTest,
                         testing::Values(RotationCase{2, RotationKind::kHadamard},
                                         RotationCase{16, RotationKind::kHadamard},
                                         RotationCase{80, RotationKind::kHadamard},
                                         RotationCase{128, RotationKind::kHadamard},
                                         RotationCase{64, RotationKind::kHaar}),
                         [](const auto& c) {
                           return (c.param.kind == RotationKind::kHaar ? "haar" : "hadamard") +
                                  std::to_string(c.param.dims);
                         });

// The quantiser's levels expect coordinates that look normal, whatever the vector was.
TEST(Rotation, spreads_a_single_large_coordinate) {
  constexpr std::int64_t kDims = 128;
  double fourth_moment = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto rotation = make_rotation(kDims, seed);
    for (const float number : column(*rotation, static_cast<std::int64_t>(seed * 5))) {
      fourth_moment += std::pow(static_cast<double>(number), 4) * kDims / 20;
    }
  }
  EXPECT_NEAR(fourth_moment, 3, 0.3);  // a normal number's
}

// Codes that one machine wrote must mean the same on another.
TEST(Rotation, is_the_same_bits_on_every_machine) {
  EXPECT_EQ(fingerprint(column(*make_rotation(128, 42), 7)), 4508350060856754784u);
  EXPECT_EQ(fingerprint(column(*make_rotation(96, 42), 7)), 2198971915036109352u);
  EXPECT_EQ(fingerprint(column(*make_projection(40, 64, 42), 7)), 10418742187842755653u);
}

TEST(Projection, entries_have_variance_one_and_the_transposed_is_its_adjoint) {
  for (const auto kind : {ProjectionKind::kOrthogonal, ProjectionKind::kGaussian}) {
    for (const std::int64_t n_rows : {1, 40, 64, 100, 256}) {
      constexpr std::int64_t kDims = 64;
      const auto projection = make_projection(n_rows, kDims, 9, kind);
      double squares = 0;
      for (std::int64_t j = 0; j < kDims; ++j) {
        const auto entries = column(*projection, j);
        squares += inner(entries.data(), entries.data(), n_rows);
      }
      const double mean = squares / static_cast<double>(n_rows * kDims);
      EXPECT_NEAR(mean, 1, kind == ProjectionKind::kOrthogonal ? kTolerance : 0.6);

      const Vectors x = normal_vectors(1, kDims, 1);
      const Vectors y = normal_vectors(1, n_rows, 2);
      Vectors forward(static_cast<std::size_t>(n_rows)), backward(kDims);
      projection->apply(x.data(), forward.data());
      projection->apply_transposed(y.data(), backward.data());
      EXPECT_NEAR(inner(forward.data(), y.data(), n_rows), inner(x.data(), backward.data(), kDims),
                  1e-3);
    }
  }
}

}  // namespace
}  // namespace kvpool::methods
