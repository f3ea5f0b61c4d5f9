#include "kvpool/methods/magnitude.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kvpool::methods {
namespace {

constexpr float kRelativeError = 0x1p-10f;

TEST(Magnitude, keeps_numbers_of_any_size_within_half_a_unit) {
  for (float value = 1e-18f; value < 1e19f; value *= 1.37f) {
    EXPECT_NEAR(from_magnitude(to_magnitude(value)), value, value * kRelativeError);
  }
}

TEST(Magnitude, is_exact_for_zero_and_powers_of_two) {
  EXPECT_EQ(from_magnitude(to_magnitude(0)), 0);
  for (int power = -62; power < 64; ++power) {
    const float value = std::ldexp(1.0f, power);
    EXPECT_EQ(from_magnitude(to_magnitude(value)), value);
  }
}

TEST(Magnitude, ends_at_zero_and_at_the_largest) {
  EXPECT_EQ(to_magnitude(1e-30f), 0);
  EXPECT_EQ(to_magnitude(3e38f), 0xffff);
  EXPECT_GT(from_magnitude(0xffff), 1e19f);
}

TEST(Magnitude, every_code_survives_a_round_trip) {
  for (unsigned code = 0x200; code <= 0xffff; ++code) {
    ASSERT_EQ(to_magnitude(from_magnitude(static_cast<Magnitude>(code))), code);
  }
}

}  // namespace
}  // namespace kvpool::methods
