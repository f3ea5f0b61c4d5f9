// Links the allocator alone, as an engine with its own storage would.
#include <cstdio>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"

int main() {
  using namespace kvpool::core;
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 40, /*owner=*/7);
  if (blocks.size() != 3 || pool.stats().blocks_in_use() != 3) return 1;
  pool.free_all(7);
  pool.check_invariants();
  try {
    pool.shrink(Stream::kKey, -1);
  } catch (const kvpool::InvalidArgument& error) {
    std::puts(error.what());
    return pool.stats().blocks_in_use() == 0 ? 0 : 1;
  }
  return 1;
}
