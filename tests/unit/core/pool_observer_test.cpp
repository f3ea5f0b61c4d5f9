#include "kvpool/core/pool_observer.h"

#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include "kvpool/core/block_pool_allocator.h"

namespace kvpool::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Listener : PoolObserver {
  void blocks_freed(std::span<const Event> events) noexcept override {
    for (const Event& event : events) freed.push_back(value(event.id));
  }
  void blocks_retired(std::span<const Event>) noexcept override {}
  std::vector<std::uint32_t> freed;
};

TEST(PoolObserver, hears_of_a_block_when_its_last_reference_goes) {
  BlockPoolAllocator pool({.block_size = 4, .n_blocks = 8});
  const auto listener = std::make_shared<Listener>();
  pool.add_observer(listener);
  const auto mine = pool.allocate(Stream::kKey, 4, 1);
  const auto theirs = pool.fork(1, 2);
  pool.free(mine);
  EXPECT_THAT(listener->freed, IsEmpty());
  pool.free(theirs);
  pool.free(theirs);
  EXPECT_THAT(listener->freed, ElementsAre(3));
}

TEST(PoolObserver, may_go_before_the_pool_and_the_pool_before_it) {
  const auto listener = std::make_shared<Listener>();
  {
    BlockPoolAllocator pool({.block_size = 4, .n_blocks = 8});
    pool.add_observer({});
    pool.add_observer(std::make_shared<Listener>());  // gone at once
    pool.add_observer(listener);
    (void)pool.allocate(Stream::kKey, 4, 1);
    pool.free_all(1);
  }
  EXPECT_THAT(listener->freed, ElementsAre(3));
}

}  // namespace
}  // namespace kvpool::core
