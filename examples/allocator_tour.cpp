// Two requests share a prompt's blocks; the second writes to its own copy of the tail.
#include <array>
#include <cstdio>
#include <memory>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"

using namespace kvpool;
using namespace kvpool::core;

namespace {

void show(const char* when, const BlockPoolAllocator& pool) {
  const AllocationStats stats = pool.stats();
  std::printf("%-34s %2lld in use, %2lld free for keys, %2lld unused slots\n", when,
              static_cast<long long>(stats.blocks_in_use()),
              static_cast<long long>(pool.n_free(Stream::kKey)),
              static_cast<long long>(stats.unused_slots()));
}

/// What a storage would do: let go of the bytes of blocks that nobody refers to.
struct Listener : PoolObserver {
  void blocks_freed(std::span<const Event> events) noexcept override {
    std::printf("  (%zu blocks went back)\n", events.size());
  }
  void blocks_retired(std::span<const Event> events) noexcept override {
    std::printf("  (%zu ids are gone for good)\n", events.size());
  }
};

}  // namespace

int main() {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 32});
  const auto listener = std::make_shared<Listener>();
  pool.add_observer(listener);

  // Keys and values of a prompt of 40 tokens, together: three blocks each, the last half empty.
  constexpr OwnerId kFirst = 1;
  std::array<BlockHandle, 3> keys;
  std::array<BlockHandle, 3> values;
  if (const auto shortage = pool.try_allocate_kv(40, kFirst, {}, {}, keys, values)) {
    std::puts(shortage->message("allocator_tour").c_str());
    return 1;
  }
  show("a prompt of 40 tokens", pool);

  // A second request continues the same prompt: it shares all six blocks.
  const OwnerId second = pool.new_owner();
  pool.fork(kFirst, second);
  show("forked", pool);

  // Its first own token goes to the tail, which it may not change for the first request.
  for (const BlockHandle& block : pool.blocks_for(second)) {
    if (pool.info(block)->n_used == 16) continue;
    BlockHandle own;
    if (pool.try_writable(block, own)) return 1;
    pool.mark_used(own, 9);
  }
  show("the fork's tails are its own", pool);

  // A step that must not run out half-way reserves first.
  if (const auto shortage = pool.try_reserve(second, 20, 20)) {
    std::puts(shortage->message("BlockPoolAllocator::reserve").c_str());
  }

  pool.free_all(kFirst);
  show("the first request is done", pool);
  pool.free_all(second);
  show("the second too", pool);

  pool.shrink(Stream::kKey, 4);
  show("shrunk to 4 free key blocks", pool);

  try {
    pool.mark_used(keys[0], 1);
  } catch (const InvalidArgument& error) {
    std::puts(error.what());
  }
  pool.check_invariants();
}
