// Random call sequences, compared with the naive model after each call.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "support/pool_pair.h"

namespace kvpool::core::testing {
namespace {

#ifdef __SANITIZE_THREAD__  // one thread has no races to show, and runs slowly
constexpr int kSequences = 10;
#else
constexpr int kSequences = 100;
#endif

rc::Gen<Command> any_command() {
  return rc::gen::map(
      rc::gen::container<std::array<std::uint8_t, Command::kSize>>(
          rc::gen::arbitrary<std::uint8_t>()),
      [](const std::array<std::uint8_t, Command::kSize>& bytes) { return Command{bytes}; });
}

TEST(AllocatorProperty, does_what_the_naive_pool_does) {
  rc::detail::TestParams params;
  params.seed = 20250607;
  params.maxSuccess = 10 * kSequences;
  params.maxSize = 120;
  const auto property = [](std::uint8_t shape, std::uint8_t size) {
    const auto commands = *rc::gen::container<std::vector<Command>>(any_command());
    PoolPair pair(small_config(shape, size));
    for (const Command& command : commands) pair.step(command);
  };
  const auto result = rc::detail::checkTestable(property, rc::detail::TestMetadata(), params);
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  EXPECT_TRUE(result.is<rc::detail::SuccessResult>()) << text.str();
}

// RapidCheck's sequences are short and shrink well; these go on until ids, records and slots have
// been used many times over.
TEST(AllocatorProperty, does_so_through_long_sequences) {
  std::uint64_t state = 1;
  const auto next = [&state] {  // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  };
  for (int sequence = 0; sequence < kSequences; ++sequence) {
    SCOPED_TRACE(sequence);
    PoolPair pair(small_config(static_cast<std::uint8_t>(next() >> 9),
                               static_cast<std::uint8_t>(next() >> 9)));
    for (int i = 0; i < 500; ++i) {
      Command command;
      for (auto& byte : command.bytes) byte = static_cast<std::uint8_t>(next() >> 11);
      ASSERT_NO_THROW(pair.step(command)) << "step " << i << ": " << command;
    }
  }
}

}  // namespace
}  // namespace kvpool::core::testing
