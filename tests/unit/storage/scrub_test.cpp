// StorageOptions::scrub_on_free, seen in the memory itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kvpool/storage/block_storage.h"

namespace kvpool::storage {
namespace {

using core::BlockHandle;
using core::BlockPoolAllocator;
using core::Stream;
using formats::Format;

// Looks at a free block's bytes, which AddressSanitizer would report in ordinary code.
[[gnu::no_sanitize("address"), gnu::noinline]] bool all_zero(const volatile std::byte* bytes,
                                                             std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) {
    if (bytes[i] != std::byte{0}) return false;
  }
  return true;
}

bool memory_is_zero_after_free(bool scrub) {
  BlockPoolAllocator pool{{.block_size = 4, .n_blocks = 2, .separate_kv = false}};
  BlockStorage storage(pool, 8, {.scrub_on_free = scrub});
  const BlockHandle block =
      pool.allocate(Stream::kShared, 4, 1, pool.intern_format("fp16")).front();
  storage.write(block, 0, Format::kFp16, std::vector<std::byte>(64, std::byte{0x5a}));
  const auto bytes = storage.bytes(block);
  EXPECT_FALSE(all_zero(bytes.data(), bytes.size()));
  pool.free(std::span(&block, 1));  // the buffer stays where it is
  storage.check_invariants();
  return all_zero(bytes.data(), bytes.size());
}

TEST(Scrub, freeing_a_block_zeroes_its_memory) { EXPECT_TRUE(memory_is_zero_after_free(true)); }

TEST(Scrub, without_the_option_memory_is_zeroed_only_at_the_next_use) {
  EXPECT_FALSE(memory_is_zero_after_free(false));
}

TEST(Scrub, a_block_shared_by_two_is_zeroed_when_the_second_lets_go) {
  BlockPoolAllocator pool{{.block_size = 4, .n_blocks = 2, .separate_kv = false}};
  BlockStorage storage(pool, 8, {.scrub_on_free = true});
  const BlockHandle block =
      pool.allocate(Stream::kShared, 4, 1, pool.intern_format("fp16")).front();
  storage.write(block, 0, Format::kFp16, std::vector<std::byte>(64, std::byte{0x5a}));
  const auto bytes = storage.bytes(block);
  pool.fork(1, 2);
  pool.free_all(1);
  EXPECT_FALSE(all_zero(bytes.data(), bytes.size()));
  pool.free_all(2);
  EXPECT_TRUE(all_zero(bytes.data(), bytes.size()));
}

}  // namespace
}  // namespace kvpool::storage
