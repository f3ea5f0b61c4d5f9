// Faults that users of other paged caches have reported; each test is named after its case's id.
#include <algorithm>

#include "paged_fixture.h"

namespace kvpool::cache::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;

std::vector<std::unique_ptr<PagedLayer>> fork(const Cache& cache, OwnerId owner) {
  return cache.layer->group()->fork(owner);
}

Cache copy_of(const Cache& cache, OwnerId owner) {
  return {std::move(fork(cache, owner)[0]), cache.tokens};
}

/// Of each block of an owner, fewest first.
std::vector<std::int64_t> references(const PagedPool& pool, OwnerId owner) {
  std::vector<std::int64_t> counts;
  for (const core::BlockHandle& block : pool.blocks().blocks_for(owner)) {
    counts.push_back(pool.blocks().info(block)->n_references);
  }
  std::ranges::sort(counts);
  return counts;
}

TEST(PagedFieldCases, field_C1_each_writer_of_a_shared_tail_gets_its_own) {
  const auto pool = make_pool(16, 16);
  Cache a = make_cache(pool, 1);
  a.append(20, 0);
  Cache b = copy_of(a, 2);
  a.append(1, 100);
  b.append(1, 200);
  EXPECT_EQ(a.error(), 0);
  EXPECT_EQ(b.error(), 0);
  for (OwnerId owner : {1, 2}) EXPECT_THAT(references(*pool, owner), ElementsAre(1, 1, 2, 2));
  EXPECT_EQ(a.layer->view()->keys().pages[0].data, b.layer->view()->keys().pages[0].data);
  EXPECT_NE(a.layer->view()->keys().pages[1].data, b.layer->view()->keys().pages[1].data);
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 6);
  check_all(*pool);
}

TEST(PagedFieldCases, field_C2_a_copy_takes_every_byte_of_every_layer_and_stream) {
  const auto pool = make_pool(32, 16);
  const auto group = std::make_shared<PagedGroup>(pool, 1);
  std::vector<Cache> origins;
  for (int i = 0; i < 3; ++i) {
    PagedLayerSpec spec = small_spec();
    if (i == 1) spec.keys.recent = spec.values.recent = Format::kInt8;  // codes and scales
    origins.push_back({group->add_layer(spec), {}});
  }
  for (Cache& origin : origins) origin.append(9, 50);
  std::vector<std::vector<float>> before;
  const auto bytes_of = [](const PagedLayer& layer) {
    std::vector<float> numbers(9 * 8);
    layer.view()->read_keys(1, 0, 9, numbers.data(), 8);
    return numbers;
  };
  for (const Cache& origin : origins) before.push_back(bytes_of(*origin.layer));
  auto copies = group->fork(2);
  for (std::size_t i = 0; i < 3; ++i) {
    Cache copy{std::move(copies[i]), origins[i].tokens};
    copy.append(1, 90);
    EXPECT_EQ(bytes_of(*copy.layer), before[i]);
    if (i != 1) {
      EXPECT_EQ(copy.error(), 0);
    }
  }
}

TEST(PagedFieldCases, field_C3_a_full_pool_leaves_a_shared_tail_alone) {
  const auto pool = make_pool(4, 4);
  Cache a = make_cache(pool, 1);
  a.append(6, 0);
  Cache b = copy_of(a, 2);
  EXPECT_THROW(b.append(1, 90), StepExhausted);
  EXPECT_EQ(a.error(), 0);
  EXPECT_EQ(b.error(), 0);
  check_all(*pool);
}

TEST(PagedFieldCases, field_C5_a_fork_that_cannot_write_changes_nothing) {
  const auto pool = make_pool(8, 4);
  Cache a = make_cache(pool, 1);
  a.append(10, 0);  // 3 pairs, the last one partial
  Cache other = make_cache(pool, 5);
  other.append(1, 70);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 0);
  Cache b = copy_of(a, 2);
  const auto bytes = pool->store().stats();
  EXPECT_THROW(b.append(1, 90), StepExhausted);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 0);
  EXPECT_EQ(pool->store().stats(), bytes);
  EXPECT_EQ(a.error(), 0);
  EXPECT_EQ(b.error(), 0);
  b.layer->group()->check_invariants();
  check_all(*pool);
}

TEST(PagedFieldCases, field_C7_a_copy_shares_the_pool_and_its_first_write_costs_one_pair) {
  const auto pool = make_pool(20, 4);
  Cache a = make_cache(pool, 1);
  a.append(10, 0);
  const auto bytes = pool->store().stats().used_bytes;
  Cache b = copy_of(a, 2);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 14);
  EXPECT_EQ(pool->store().stats().used_bytes, bytes);
  EXPECT_THAT(references(*pool, 1), AllOf(SizeIs(6), Each(2)));
  b.append(1, 90);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 12);
}

TEST(PagedFieldCases, field_A3_no_block_is_counted_twice_behind_a_window) {
  const auto pool = make_pool(16, 4);
  PagedLayerSpec spec = small_spec();
  spec.window = 6;
  Cache a = make_cache(pool, 1, spec);
  for (int token = 0; token < 30; ++token) a.append(1, token);
  Cache b = copy_of(a, 2);
  EXPECT_THAT(references(*pool, 1), Each(2));
  a.layer->release();
  b.layer->release();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 16);
}

TEST(PagedFieldCases, field_A5_forks_end_in_any_order) {
  const auto pool = make_pool(32, 4);
  Cache a = make_cache(pool, 1);
  a.append(6, 0);
  Cache b = copy_of(a, 2);
  b.append(1, 60);
  Cache c = copy_of(b, 3);
  a.layer.reset();
  EXPECT_EQ(b.error(), 0);
  c.append(3, 80);
  c.layer.reset();
  EXPECT_EQ(b.error(), 0);
  b.layer.reset();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 32);
  EXPECT_EQ(pool->store().stats().committed_bytes, 0);
}

TEST(PagedFieldCases, field_A13_a_shared_partial_tail_ends_once) {
  const auto pool = make_pool(8, 16);
  Cache a = make_cache(pool, 1);
  a.append(20, 0);
  Cache b = copy_of(a, 2);
  a.layer->release();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 4);
  EXPECT_EQ(b.error(), 0);
  b.layer->release();
  b.layer->release();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 8);
  check_all(*pool);
}

TEST(PagedFieldCases, field_D3_no_block_of_a_lazy_reader_is_handed_out) {
  const auto pool = make_pool(4, 4);
  Cache a = make_cache(pool, 1);
  a.append(5, 0);
  auto view = a.layer->view();
  a.layer->release();
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 4);
  EXPECT_FALSE(pool->blocks().is_active(1));
  Cache b = make_cache(pool, 2);
  EXPECT_THROW(b.append(1, 50), StepExhausted);
  EXPECT_EQ(a.rows().error_of(*view, a.tokens), 0);
  view.reset();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 4);
  b.append(1, 50);
  EXPECT_EQ(b.error(), 0);
}

TEST(PagedFieldCases, field_D10_freeing_behind_a_lazy_reader_is_deferred) {
  const auto pool = make_pool(8, 4);
  Cache a = make_cache(pool, 1);
  a.append(5, 0);
  auto view = a.layer->view();
  EXPECT_EQ(pool->blocks().free_all(1), 4);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 4);
  Cache b = make_cache(pool, 2);
  b.append(8, 50);
  EXPECT_EQ(a.rows().error_of(*view, a.tokens), 0);
  EXPECT_THROW(a.layer->append(1), LeaseLost);
  view.reset();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 4);
  check_all(*pool);
}

TEST(PagedFieldCases, blocks_freed_behind_a_cache_that_nobody_reads_are_free_at_once) {
  const auto pool = make_pool(16, 4);
  Cache a = make_cache(pool, 1);
  Cache other = make_cache(pool, 1);
  Cache third = make_cache(pool, 3);
  for (Cache* cache : {&a, &other, &third}) cache->append(5, 0);
  (void)a.layer->view();
  (void)third.layer->view();
  auto view = other.layer->view();
  EXPECT_EQ(pool->blocks().free_all(1), 8);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 8);
  view.reset();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 12);
  EXPECT_THROW(a.layer->view(), LeaseLost);
  EXPECT_THROW(other.layer->append(1), LeaseLost);
  EXPECT_EQ(third.error(), 0);
  check_all(*pool);
}

TEST(PagedFieldCases, blocks_that_a_cache_gives_back_itself_are_free_at_once) {
  const auto pool = make_pool(16, 4);
  PagedLayerSpec spec = small_spec();
  spec.window = 6;
  Cache a = make_cache(pool, 1);
  Cache windowed = make_cache(pool, 2, spec);
  a.append(14, 0);
  for (int token = 0; token < 20; ++token) {
    windowed.append(1, token);
    (void)windowed.layer->view();
  }
  EXPECT_EQ(windowed.layer->n_blocks(), 4);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 4);
  (void)a.layer->view();
  a.layer->trim(7);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 8);
  (void)a.layer->view();
  a.layer->reset();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 12);
  windowed.layer->release();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 16);
  check_all(*pool);
}

TEST(PagedFieldCases, a_trim_under_a_reader_rewrites_elsewhere) {
  const auto pool = make_pool(16, 4);
  Cache a = make_cache(pool, 1);
  a.append(7, 0);
  const auto view = a.layer->view();
  const auto tokens = a.tokens;
  a.layer->trim(2);
  a.tokens.resize(5);
  a.append(4, 60);
  EXPECT_EQ(a.error(), 0);
  EXPECT_EQ(a.rows().error_of(*view, tokens), 0);
  a.layer->group()->check_invariants();
}

TEST(PagedFieldCases, an_append_past_a_reader_copies_nothing) {
  const auto pool = make_pool(16, 4);
  Cache a = make_cache(pool, 1);
  a.append(6, 0);
  const auto view = a.layer->view();
  const auto tokens = a.tokens;
  const auto plan = a.layer->append(1);
  EXPECT_FALSE(plan->moves_pages());
  a.rows().write(*plan, {99});
  EXPECT_EQ(a.rows().error_of(*view, tokens), 0);
  EXPECT_EQ(a.layer->view()->keys().pages.data(), view->keys().pages.data());
}

TEST(PagedFieldCases, a_fork_does_not_write_under_the_readers_of_its_origin) {
  const auto pool = make_pool(16, 4);
  Cache a = make_cache(pool, 1);
  a.append(6, 0);
  const auto view = a.layer->view();
  Cache b = copy_of(a, 2);
  a.append(1, 40);  // copies the tail: the old one is b's alone now, but for the view
  b.layer->trim(1);
  b.tokens.resize(5);
  b.append(1, 50);
  EXPECT_EQ(a.rows().error_of(*view, {0, 1, 2, 3, 4, 5}), 0);
  EXPECT_EQ(a.error(), 0);
  EXPECT_EQ(b.error(), 0);
}

TEST(PagedFieldCases, field_E14_growth_copies_nothing) {
  const auto pool = make_pool(1024, 16);
  Cache a = make_cache(pool, 1);
  for (int token = 0; token < 4096; ++token) {
    const auto plan = a.layer->append(1);
    ASSERT_FALSE(plan->moves_pages());
    ASSERT_EQ(plan->keys().pieces.size(), 1u);
  }
  EXPECT_EQ(a.layer->n_blocks(), 512);
}

TEST(PagedFieldCases, field_E18_positions_behind_the_window_are_gone) {
  const auto pool = make_pool(16, 4);
  PagedLayerSpec spec = small_spec();
  spec.window = 5;
  Cache a = make_cache(pool, 1, spec);
  for (int token = 0; token < 9; ++token) a.append(1, token);
  const auto view = a.layer->view();
  EXPECT_EQ(view->n_pages(), 2);
  EXPECT_EQ(view->first_position(), 4);
  EXPECT_EQ(view->length(), 5);
  EXPECT_EQ(view->last_page_len(), 1);  // position 8: the second page, slot 0
  EXPECT_EQ(a.error(), 0);
  a.layer->group()->check_invariants();
}

TEST(PagedFieldCases, field_F3_a_closed_window_is_not_trimmed) {
  const auto pool = make_pool(32, 4);
  PagedLayerSpec spec = small_spec();
  spec.window = 8;
  Cache a = make_cache(pool, 1, spec);
  for (int token = 0; token < 20; ++token) a.append(1, token);
  EXPECT_FALSE(a.layer->is_trimmable());
  EXPECT_EQ(a.layer->trim(5), 0);
  EXPECT_EQ(a.layer->offset(), 20);
  EXPECT_EQ(a.error(), 0);
}

TEST(PagedFieldCases, field_F4_no_trim_reaches_behind_the_window) {
  const auto pool = make_pool(1024, 16);
  PagedLayerSpec spec = small_spec();
  spec.window = 1024;
  Cache a = make_cache(pool, 1, spec);
  a.append(6000, 0);
  EXPECT_EQ(a.layer->trim(3000), 0);
  EXPECT_EQ(a.layer->offset(), 6000);
}

TEST(PagedFieldCases, field_F14_chunks_behind_a_window_do_not_pile_up) {
  const auto pool = make_pool(64, 1);
  PagedLayerSpec spec = small_spec();
  spec.window = 8;
  Cache a = make_cache(pool, 1, spec);
  a.append(8, 0);
  EXPECT_EQ(a.layer->length(), 8);
  for (int i = 0; i < 3; ++i) {
    a.append(3, 10 * i + 10);
    EXPECT_EQ(a.layer->length(), 10);
  }
  a.append(1, 50);
  EXPECT_EQ(a.layer->length(), 8);
  EXPECT_EQ(a.error(), 0);
}

TEST(PagedFieldCases, field_F21_blocks_behind_a_window_stay_whole_for_their_reader) {
  const auto pool = make_pool(32, 4);
  PagedLayerSpec spec = small_spec();
  spec.window = 4;
  Cache a = make_cache(pool, 1, spec);
  a.append(6, 0);
  auto view = a.layer->view();
  for (int token = 6; token < 30; ++token) a.append(1, token);
  EXPECT_EQ(a.rows().error_of(*view, {0, 1, 2, 3, 4, 5}), 0);
  EXPECT_EQ(a.error(), 0);
  const auto in_use = pool->blocks().stats().blocks_in_use();
  view.reset();
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), in_use - 4);
  check_all(*pool);
}

}  // namespace
}  // namespace kvpool::cache::testing
