// Random calls against a naive model: the rows of each checkout.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/storage/block_storage.h"

namespace kvpool::storage {
namespace {

using core::BlockHandle;
using core::BlockPoolAllocator;
using core::Stream;
using formats::Format;
using formats::kFormats;

constexpr std::int64_t kBlockSize = 3;
constexpr std::int64_t kWidth = 5;

struct Model {
  BlockHandle handle;
  Format format;
  std::int64_t n_used = 0;
  std::vector<std::byte> bytes;
};

void check_random_calls() {
  BlockPoolAllocator pool{{.block_size = kBlockSize,
                           .n_blocks = 3,
                           .separate_kv = false,
                           .grow_on_exhaustion = true,
                           .max_blocks = 6}};
  BlockStorage storage(pool, kWidth,
                       {.scrub_on_free = *rc::gen::arbitrary<bool>(), .idle_limit_bytes = 100});
  std::vector<Model> live;
  std::vector<BlockHandle> stale;
  const auto pick = [&] { return *rc::gen::inRange<std::size_t>(0, live.size()); };

  const int steps = *rc::gen::inRange(0, 60);
  for (int step = 0; step < steps; ++step) {
    switch (*rc::gen::inRange(0, 6)) {
      case 0: {
        const auto& traits = kFormats[*rc::gen::inRange<std::size_t>(0, kFormats.size())];
        BlockHandle block;
        if (pool.try_allocate(Stream::kShared, 1, 1, pool.intern_format(traits.name),
                              std::span(&block, 1))) {
          break;
        }
        pool.mark_used(block, 0);
        live.push_back(
            {block, traits.format, 0,
             std::vector<std::byte>(kBlockSize * formats::row_bytes(traits.format, kWidth))});
        break;
      }
      case 1: {
        if (live.empty()) break;
        Model& model = live[pick()];
        const auto offset = *rc::gen::inRange<std::int64_t>(0, kBlockSize + 1);
        const auto n = *rc::gen::inRange<std::int64_t>(0, kBlockSize + 1 - offset);
        const std::size_t row_bytes = formats::row_bytes(model.format, kWidth);
        const std::vector<std::byte> rows(static_cast<std::size_t>(n) * row_bytes,
                                          static_cast<std::byte>(step + 1));
        storage.write(model.handle, offset, model.format, rows);
        std::ranges::copy(rows,
                          model.bytes.begin() + static_cast<std::ptrdiff_t>(offset * row_bytes));
        if (n > 0) model.n_used = std::max(model.n_used, offset + n);
        break;
      }
      case 2: {
        if (live.empty()) break;
        const std::size_t i = pick();
        pool.free(std::span(&live[i].handle, 1));
        stale.push_back(live[i].handle);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
      case 3:
        pool.shrink(Stream::kShared, *rc::gen::inRange(0, 3));
        break;
      case 4: {
        if (live.empty()) break;
        Model& model = live[pick()];
        storage.release(model.handle);
        std::ranges::fill(model.bytes, std::byte{0});
        break;
      }
      default: {
        if (stale.empty()) break;
        const BlockHandle& handle = stale[*rc::gen::inRange<std::size_t>(0, stale.size())];
        storage.release(handle);
        RC_ASSERT_THROWS_AS(storage.read(handle), InvalidArgument);
      }
    }
    for (const Model& model : live) {
      RC_ASSERT(storage.read_all(model.handle).bytes == model.bytes);
      RC_ASSERT(storage.read(model.handle).n_rows == model.n_used);
    }
    storage.check_invariants();
  }
}

TEST(StorageProperty, agrees_with_the_rows_of_a_model) {
  rc::detail::TestParams params;
  params.seed = 20250608;
  params.maxSuccess = 500;
  const auto result =
      rc::detail::checkTestable(check_random_calls, rc::detail::TestMetadata(), params);
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  EXPECT_TRUE(result.is<rc::detail::SuccessResult>()) << text.str();
}

}  // namespace
}  // namespace kvpool::storage
