#include "kvpool/methods/codebook.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kvpool/methods/angle_codebook.h"
#include "vectors.h"

namespace kvpool::methods {
namespace {

// Levels are rounded to eleven bits.
constexpr double kRounding = 0x1p-10;

TEST(Codebook, has_the_published_levels_of_a_normal_density) {
  const std::vector<std::vector<double>> published = {
      {0.797884},
      {0.452779, 1.510416},
      {0.245093, 0.756001, 1.343904, 2.15194},
      {0.128392, 0.38804, 0.656747, 0.942324, 1.256211, 1.618025, 2.068995, 2.732569}};
  for (int bits = 1; bits <= 4; ++bits) {
    const Codebook codebook = Codebook::of_unit_vectors(128, bits);
    const auto& positive = published[static_cast<std::size_t>(bits - 1)];
    const std::size_t n = positive.size();
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_NEAR(codebook.levels()[n + i], positive[i], positive[i] * 2 * kRounding);
      EXPECT_NEAR(codebook.levels()[n - 1 - i], -positive[i], positive[i] * 2 * kRounding);
    }
  }
}

TEST(Codebook, follows_the_sphere_in_few_dimensions) {
  const Codebook codebook = Codebook::of_unit_vectors(32, 2);
  EXPECT_NEAR(codebook.levels()[2], 0.451427, 1e-3);
  EXPECT_NEAR(codebook.levels()[3], 1.489558, 2e-3);
  // The only coordinate of a unit vector is 1 or -1.
  EXPECT_GT(Codebook::of_unit_vectors(1, 1).levels()[1], 0.8f);
}

// sqrt(3) pi / 2 * 4^-bits bounds it for many bits (Panter, Dite); the first are known.
TEST(Codebook, mean_squared_error_is_that_of_an_optimal_quantiser) {
  const Vectors numbers = normal_vectors(200000, 1, 17);
  const double known[] = {1,       0.3634,  0.1175,   0.03454, 0.009497,
                          0.00250, 0.00064, 0.000164, 4.125e-5};
  for (int bits = 0; bits <= 8; ++bits) {
    const Codebook codebook = Codebook::of_unit_vectors(128, bits);
    double error = 0;
    for (const float number : numbers) {
      const double miss = static_cast<double>(number - codebook.level(codebook.code(number)));
      error += miss * miss / static_cast<double>(numbers.size());
    }
    EXPECT_NEAR(error, known[bits], 0.03 * known[bits]) << bits << " bits";
  }
}

TEST(Codebook, code_is_the_nearest_level_and_a_tie_goes_down) {
  const Codebook codebook = Codebook::of_unit_vectors(128, 3);
  for (float value = -4; value < 4; value += 0.013f) {
    const float found = std::abs(value - codebook.level(codebook.code(value)));
    for (int level = 0; level < 8; ++level) {
      EXPECT_LE(found, std::abs(value - codebook.levels()[level]) + 1e-6f);
    }
  }
  const float middle = (codebook.level(4) + codebook.level(5)) / 2;
  EXPECT_EQ(codebook.code(middle), 4);
  EXPECT_EQ(codebook.code(std::nextafter(middle, 9.0f)), 5);
}

TEST(AngleCodebook, has_the_published_levels) {
  const std::vector<std::vector<double>> published = {{.30976, .63398, .93682, 1.26104},
                                                      {.42625, .67439, .89641, 1.14455},
                                                      {.52421, .70591, .86489, 1.04658}};
  for (int level = 1; level <= 3; ++level) {
    const auto codebook = AngleCodebook::first_quadrant((1 << level) - 1, 2);
    for (std::size_t code = 0; code < 4; ++code) {
      const auto at = static_cast<std::size_t>(level - 1);
      EXPECT_NEAR(std::atan2(codebook.sines()[code], codebook.cosines()[code]), published[at][code],
                  2e-3);
    }
  }
}

TEST(AngleCodebook, codes_of_the_circle_are_the_cells_that_angles_fall_into) {
  for (int bits = 1; bits <= 8; ++bits) {
    const auto codebook = AngleCodebook::whole_circle(bits);
    const int n_cells = 1 << bits;
    for (int i = 0; i < 4 * n_cells; ++i) {
      const double angle = (i + 0.5) / (4 * n_cells) * 2 * M_PI;
      const auto code = codebook.code(static_cast<float>(3 * std::cos(angle)),
                                      static_cast<float>(3 * std::sin(angle)));
      EXPECT_EQ(code, i / 4) << bits << " bits, angle " << angle;
    }
  }
}

TEST(AngleCodebook, codes_of_the_quadrant_are_the_nearest_angles) {
  for (int bits = 0; bits <= 8; ++bits) {
    const auto codebook = AngleCodebook::first_quadrant(3, bits);
    for (double angle = 0.001; angle < M_PI / 2; angle += 0.01) {
      const auto code =
          codebook.code(static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle)));
      const auto miss = [&](int level) {
        return std::abs(angle - std::atan2(static_cast<double>(codebook.sines()[level]),
                                           static_cast<double>(codebook.cosines()[level])));
      };
      for (int level = 0; level < 1 << bits; ++level) EXPECT_LE(miss(code), miss(level) + 1e-5);
    }
  }
}

}  // namespace
}  // namespace kvpool::methods
