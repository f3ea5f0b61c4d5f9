// A decode loop over blocks: keys and values of one head lie in fp16 blocks of a pool, and exact
// attention reads them where they lie. Links kvpool::storage and kvpool::kernels.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kvpool/cache/exact_kv_cache.h"
#include "kvpool/core/block_pool_allocator.h"
#include "kvpool/formats/rows.h"
#include "kvpool/kernels/attention.h"
#include "kvpool/storage/block_storage.h"

namespace {

using kvpool::core::BlockHandle;
using kvpool::core::Stream;
using kvpool::formats::Format;

constexpr std::int64_t kHeadDim = 64;
constexpr kvpool::OwnerId kRequest = 1;

// A stand-in for the model's projections: any numbers do.
std::vector<float> row(int token, float phase) {
  std::vector<float> out(kHeadDim);
  for (std::size_t j = 0; j < out.size(); ++j) {
    out[j] = std::sin(phase + 0.1f * static_cast<float>(token) * static_cast<float>(j + 1));
  }
  return out;
}

void write_row(kvpool::storage::BlockStorage& storage, const BlockHandle& block,
               std::int64_t offset, const std::vector<float>& numbers) {
  std::vector<std::byte> bytes(kvpool::formats::row_bytes(Format::kFp16, numbers.size()));
  if (kvpool::formats::encode_row(Format::kFp16, numbers, bytes)) std::abort();  // codes only
  storage.write(block, offset, Format::kFp16, bytes);
}

}  // namespace

int main() {
  kvpool::core::BlockPoolAllocator pool({.block_size = 256, .n_blocks = 8});
  kvpool::storage::BlockStorage storage(pool, kHeadDim);
  const auto fp16 = pool.intern_format("fp16");
  // The same tokens in a cache with memory of its own, to compare with.
  kvpool::cache::ExactKVCache cache({.head_dim = kHeadDim, .format = Format::kFp16});

  // One block of each stream holds the whole sequence here; a paged kernel would walk a table.
  std::vector<BlockHandle> keys(1);
  std::vector<BlockHandle> values(1);
  if (const auto shortage = pool.try_allocate_kv(1, kRequest, fp16, fp16, keys, values)) {
    std::puts(shortage->message("exact_attention").c_str());
    return 1;
  }
  std::vector<float> output(kHeadDim);
  std::vector<float> expected(kHeadDim);
  for (int token = 0; token < 100; ++token) {
    const std::vector<float> key = row(token, 0);
    const std::vector<float> value = row(token, 1);
    write_row(storage, keys[0], token, key);
    write_row(storage, values[0], token, value);
    cache.append(key, value);

    const std::vector<float> query = row(token, 2);
    kvpool::kernels::attention({.queries = query.data(),
                                .keys = storage.bytes(keys[0]).data(),
                                .values = storage.bytes(values[0]).data(),
                                .format = Format::kFp16,
                                .n_queries = 1,
                                .n_tokens = token + 1,
                                .head_dim = kHeadDim,
                                .value_dim = kHeadDim,
                                .scale = kvpool::kernels::attention_scale(kHeadDim),
                                .output = output.data()});
    cache.attend(query, expected);
    if (!std::ranges::equal(output, expected)) {
      std::puts("the pool's rows and the cache's differ");
      return 1;
    }
  }
  const auto stats = pool.stats();
  std::printf("100 tokens in %lld blocks, %lld slots unused, %zu bytes resident\n",
              static_cast<long long>(stats.blocks_in_use()),
              static_cast<long long>(stats.unused_slots()), storage.resident_bytes());
  pool.free_all(kRequest);
  pool.shrink(Stream::kKey, 0);
  pool.shrink(Stream::kValue, 0);
  std::printf("after the request and a shrink: %zu bytes resident\n", storage.resident_bytes());
  return 0;
}
