// One storage used from many threads; ThreadSanitizer's preset is where a missing lock shows.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/storage/block_storage.h"

namespace kvpool::storage {
namespace {

using core::BlockHandle;
using core::BlockPoolAllocator;
using core::Stream;
using formats::Format;

constexpr std::int64_t kWidth = 16;
constexpr std::int64_t kRounds = 2000;

TEST(StorageThreads, each_owner_reads_what_it_wrote_while_blocks_change_hands) {
  BlockPoolAllocator pool{{.block_size = 4, .n_blocks = 16, .separate_kv = false}};
  BlockStorage storage(pool, kWidth, {.scrub_on_free = true});
  const core::FormatTag tags[] = {pool.intern_format("fp16"), pool.intern_format("int8")};
  const auto work = [&](OwnerId owner) {
    std::mt19937 random(static_cast<unsigned>(owner));
    for (std::int64_t i = 0; i < kRounds; ++i) {
      const bool wide = random() % 2 == 0;
      BlockHandle block;
      if (pool.try_allocate(Stream::kShared, 1, owner, tags[wide ? 0 : 1], std::span(&block, 1))) {
        continue;
      }
      pool.mark_used(block, 0);
      const Format format = wide ? Format::kFp16 : Format::kInt8;
      const std::vector<std::byte> rows(2 * formats::row_bytes(format, kWidth),
                                        static_cast<std::byte>(owner));
      storage.write(block, 0, format, rows);
      EXPECT_EQ(storage.read(block).bytes, rows);
      const BlockRows all = storage.read_all(block);
      EXPECT_TRUE(std::all_of(all.bytes.begin() + static_cast<std::ptrdiff_t>(rows.size()),
                              all.bytes.end(),
                              [](std::byte byte) { return byte == std::byte{0}; }));
      pool.free(std::span(&block, 1));
    }
  };
  std::vector<std::thread> threads;
  for (OwnerId owner = 1; owner <= 4; ++owner) threads.emplace_back(work, owner);
  for (int i = 0; i < 50; ++i) storage.check_invariants();
  for (std::thread& thread : threads) thread.join();
  storage.check_invariants();
  pool.check_invariants();
  pool.shrink(Stream::kShared, 0);
  EXPECT_EQ(storage.resident_bytes(), 0u);
}

TEST(StorageThreads, a_write_races_with_the_free_of_its_block_without_harm) {
  BlockPoolAllocator pool{{.block_size = 2, .n_blocks = 1, .separate_kv = false}};
  BlockStorage storage(pool, kWidth);
  const core::FormatTag tag = pool.intern_format("int8");
  for (int round = 0; round < 300; ++round) {
    const BlockHandle block = pool.allocate(Stream::kShared, 1, 1, tag).front();
    std::thread late([&] {
      try {
        storage.write(block, 0, Format::kInt8, std::vector<std::byte>(2 * kWidth, std::byte{9}));
      } catch (const InvalidArgument&) {
        // stale by then: the documented refusal
      }
    });
    pool.free(std::span(&block, 1));
    const BlockHandle next = pool.allocate(Stream::kShared, 2, 2, tag).front();
    const BlockRows read = storage.read(next);
    EXPECT_TRUE(
        std::ranges::all_of(read.bytes, [](std::byte byte) { return byte == std::byte{0}; }));
    late.join();
    pool.free(std::span(&next, 1));
  }
  storage.check_invariants();
}

}  // namespace
}  // namespace kvpool::storage
