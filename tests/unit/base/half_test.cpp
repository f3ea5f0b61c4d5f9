#include "kvpool/base/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvpool {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Distance to the nearest of the two neighbours decides; the even one wins a tie.
template <class Widen>
std::uint16_t nearest(float value, Widen widen, std::uint16_t infinity_bits) {
  std::uint16_t best = 0;
  double best_distance = std::abs(static_cast<double>(value));
  for (std::uint32_t bits = 1; bits < infinity_bits; ++bits) {
    const double distance =
        std::abs(static_cast<double>(value) - widen(static_cast<std::uint16_t>(bits)));
    if (distance < best_distance || (distance == best_distance && bits % 2 == 0)) {
      best = static_cast<std::uint16_t>(bits);
      best_distance = distance;
    }
  }
  return best;
}

TEST(Half, widening_and_narrowing_return_every_number) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = half_to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(half_to_float(float_to_half(value)))) << bits;
    } else {
      EXPECT_EQ(float_to_half(value), half) << bits;
    }
  }
}

TEST(Bfloat16, widening_and_narrowing_return_every_number) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = bfloat16_to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bfloat16_to_float(float_to_bfloat16(value)))) << bits;
    } else {
      EXPECT_EQ(float_to_bfloat16(value), half) << bits;
    }
  }
}

TEST(Half, narrowing_picks_the_nearest_number_and_the_even_one_of_two) {
  const auto widen = [](std::uint16_t bits) { return half_to_float(bits); };
  for (const float value : {1.0f, 1.00048828125f /* tie, 1 is even */, 1.00146484375f /* tie, up */,
                            0.1f, 3.14159f, 65504.0f, 65519.0f, 6.1e-5f, 5.96e-8f, 2.9802322e-8f,
                            2.9802326e-8f, 8.9e-8f, 1e-10f, 1234.5678f}) {
    EXPECT_EQ(float_to_half(value), nearest(value, widen, 0x7c00)) << value;
    EXPECT_EQ(float_to_half(-value), nearest(value, widen, 0x7c00) | 0x8000) << value;
  }
}

TEST(Half, overflow_becomes_infinity_from_65520_on) {
  EXPECT_EQ(float_to_half(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(-1e30f), 0xfc00);
  EXPECT_EQ(half_to_float(0x7c00), kInf);
}

TEST(Bfloat16, narrowing_rounds_to_nearest_even) {
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // tie: even below
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // tie: even above
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(float_to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Half, nan_stays_nan_whatever_its_payload) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0x7fffffffu}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(half_to_float(float_to_half(nan)))) << bits;
    EXPECT_TRUE(std::isnan(bfloat16_to_float(float_to_bfloat16(nan)))) << bits;
  }
}

TEST(Half, batches_agree_with_single_conversions) {
  std::vector<std::uint16_t> bits(0x10000);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  std::vector<float> half(bits.size());
  std::vector<float> brain(bits.size());
  half_to_float(bits, half);
  bfloat16_to_float(bits, brain);
  std::vector<std::uint16_t> half_again(bits.size());
  std::vector<std::uint16_t> brain_again(bits.size());
  float_to_half(half, half_again);
  float_to_bfloat16(brain, brain_again);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    EXPECT_EQ(half_again[i], float_to_half(half_to_float(bits[i])));
    EXPECT_EQ(brain_again[i], float_to_bfloat16(bfloat16_to_float(bits[i])));
  }
}

}  // namespace
}  // namespace kvpool
