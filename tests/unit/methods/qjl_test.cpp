#include "kvpool/methods/qjl.h"

#include <gtest/gtest.h>

#include "kvpool/methods/registry.h"
#include "quality.h"

namespace kvpool::methods {
namespace {

// The published package reaches 0.5400 and 0.6363 with 260 bytes.
constexpr double kCosine = 0.72;
constexpr double kPeakedCosine = 0.80;
constexpr double kCosineOf512Signs = 0.91;

TEST(Qjl, fault_F45_a_sign_takes_a_bit) {
  const auto method = make_method({.method = "qjl"});
  EXPECT_EQ(method->keys->page_bytes(1), 18);
  EXPECT_EQ(coded_bytes_per_token(*method), 148);
  EXPECT_EQ(make_method({.method = "qjl", .jl_dim = 512})->keys->page_bytes(1), 66);
}

TEST(Qjl, orthogonal_projections_are_better_than_published_ones) {
  const Quality quality = measure({.method = "qjl"});
  EXPECT_GT(quality.cosine, kCosine);
  EXPECT_GT(quality.peaked_cosine, kPeakedCosine);
  EXPECT_LT(measure({.method = "qjl", .as_published = true}).cosine, 0.6);
}

TEST(Qjl, more_signs_are_closer) {
  EXPECT_GT(measure({.method = "qjl", .jl_dim = 512}).cosine, kCosineOf512Signs);
}

}  // namespace
}  // namespace kvpool::methods
