// Random lives of paged sequences against the naive model.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "support/sequence_model.h"

namespace kvpool::cache::testing {
namespace {

#ifdef __SANITIZE_THREAD__  // one thread has no races to show, and runs slowly
constexpr unsigned kLives = 20;
#else
constexpr unsigned kLives = 200;
#endif
constexpr int kSteps = 150;

TEST(PagedSequenceProperty, sequences_hold_and_attend_to_what_the_naive_model_does) {
  for (unsigned seed = 0; seed < kLives; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto bytes = [&random] {
      const auto bits = static_cast<std::uint32_t>(random());
      return std::array{static_cast<std::uint8_t>(bits), static_cast<std::uint8_t>(bits >> 8),
                        static_cast<std::uint8_t>(bits >> 16),
                        static_cast<std::uint8_t>(bits >> 24)};
    };
    SequenceModel model(bytes());
    for (int i = 0; i < kSteps; ++i) {
      SCOPED_TRACE(i);
      ASSERT_NO_THROW(model.step(bytes()));
    }
    ASSERT_NO_THROW(model.finish());
  }
}

}  // namespace
}  // namespace kvpool::cache::testing
