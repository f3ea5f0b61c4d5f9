#include "kvpool/storage/idle_buffers.h"

#include <gtest/gtest.h>

namespace kvpool::storage {
namespace {

TEST(IdleBuffers, a_buffer_is_taken_again_by_its_exact_size) {
  IdleBuffers idle(1000);
  AlignedBuffer buffer(100);
  const std::byte* data = buffer.data();
  idle.put(std::move(buffer));
  EXPECT_EQ(idle.bytes(), 100u);
  EXPECT_NE(idle.take(99).data(), data);
  EXPECT_EQ(idle.take(100).data(), data);
  EXPECT_EQ(idle.bytes(), 0u);
  idle.check_invariants();
}

TEST(IdleBuffers, what_passes_the_limit_is_freed) {
  IdleBuffers idle(150);
  idle.put(AlignedBuffer(100));
  idle.put(AlignedBuffer(100));
  EXPECT_EQ(idle.bytes(), 100u);
  idle.put(AlignedBuffer(50));
  EXPECT_EQ(idle.bytes(), 150u);
  idle.check_invariants();
  idle.clear();
  EXPECT_EQ(idle.bytes(), 0u);
  idle.check_invariants();
}

TEST(IdleBuffers, empty_buffers_are_not_kept) {
  IdleBuffers idle(10);
  idle.put(AlignedBuffer());
  EXPECT_EQ(idle.bytes(), 0u);
}

}  // namespace
}  // namespace kvpool::storage
