// Any bytes as calls to a pool: two for its shape, then commands. A difference from the naive model
// or a broken invariant leaves as an exception, which libFuzzer reports as a crash.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "support/pool_pair.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpool::core::testing;
  if (size < 2) return 0;
  PoolPair pair(small_config(data[0], data[1]));
  for (std::size_t at = 2; at + Command::kSize <= size; at += Command::kSize) {
    Command command;
    std::copy_n(data + at, Command::kSize, command.bytes.begin());
    pair.step(command);
  }
  return 0;
}
