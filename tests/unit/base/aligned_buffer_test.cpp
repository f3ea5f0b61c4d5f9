#include "kvpool/base/aligned_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace kvpool {
namespace {

TEST(AlignedBuffer, starts_on_a_cache_line) {
  for (const std::size_t size : {1u, 63u, 64u, 1000u}) {
    const AlignedBuffer buffer(size);
    EXPECT_EQ(buffer.size(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % AlignedBuffer::kAlignment, 0u);
  }
}

TEST(AlignedBuffer, zero_reaches_the_last_byte) {
  AlignedBuffer buffer(65);
  for (std::byte& byte : buffer.bytes()) byte = std::byte{0xff};
  buffer.zero();
  for (const std::byte byte : buffer.bytes()) EXPECT_EQ(byte, std::byte{0});
}

TEST(AlignedBuffer, moving_leaves_an_empty_buffer) {
  AlignedBuffer from(8);
  const std::byte* data = from.data();
  AlignedBuffer to(std::move(from));
  EXPECT_EQ(to.data(), data);
  AlignedBuffer third(4);
  third = std::move(to);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.size(), 8u);
  EXPECT_TRUE(to.empty());  // NOLINT(bugprone-use-after-move): the state is specified
}

TEST(AlignedBuffer, empty_takes_no_memory) {
  AlignedBuffer buffer(0);
  EXPECT_EQ(buffer.data(), nullptr);
  buffer.zero();
}

}  // namespace
}  // namespace kvpool
