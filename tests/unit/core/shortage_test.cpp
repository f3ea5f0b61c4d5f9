#include "kvpool/core/shortage.h"

#include <gtest/gtest.h>

namespace kvpool::core {
namespace {

TEST(Shortage, names_the_call_and_the_numbers) {
  const Shortage shortage{Stream::kKey, 1, 5, 4, 16};
  EXPECT_EQ(shortage.message("BlockPoolAllocator::allocate"),
            "[BlockPoolAllocator::allocate] stream k needs 5 blocks, 4 free of 16");
  const Shortage one{Stream::kShared, 1, 1, 0, 2};
  EXPECT_EQ(one.message("x"), "[x] stream kv needs 1 block, 0 free of 2");
}

}  // namespace
}  // namespace kvpool::core
