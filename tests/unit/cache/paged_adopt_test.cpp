// PagedLayer::adopt: tokens that come from elsewhere (a file, another cache).
#include "kvpool/cache/lease_errors.h"
#include "paged_fixture.h"

namespace kvpool::cache::testing {
namespace {

Cache windowed(const std::shared_ptr<PagedPool>& pool, std::int64_t window) {
  PagedLayerSpec spec = small_spec();
  spec.window = window;
  return make_cache(pool, 1, spec);
}

void adopt(Cache& cache, std::int64_t first_position, std::int64_t n, std::int64_t first_token) {
  const auto plan = cache.layer->adopt(first_position, n);
  cache.tokens.clear();
  for (std::int64_t i = 0; i < n; ++i) cache.tokens.push_back(first_token + i);
  cache.rows().write(*plan, cache.tokens);
}

TEST(PagedLayerAdopt, tokens_take_the_place_of_those_held) {
  const auto pool = make_pool(16);
  Cache cache = make_cache(pool, 1);
  cache.append(9, 0);
  adopt(cache, 0, 5, 100);
  EXPECT_EQ(cache.layer->offset(), 5);
  EXPECT_EQ(cache.layer->n_blocks(), 4);
  EXPECT_EQ(cache.error(), 0);
  cache.append(4, 200);
  EXPECT_EQ(cache.error(), 0);
  check_all(*pool);
}

TEST(PagedLayerAdopt, what_a_window_left_keeps_its_positions) {
  const auto pool = make_pool(16);
  Cache cache = windowed(pool, 6);
  adopt(cache, 400, 7, 0);
  EXPECT_EQ(cache.layer->offset(), 407);
  EXPECT_EQ(cache.layer->first_position(), 400);
  EXPECT_FALSE(cache.layer->is_trimmable());
  EXPECT_EQ(cache.error(), 0);
  for (int i = 0; i < 12; ++i) cache.append(1, 100 + i);
  EXPECT_EQ(cache.layer->offset(), 419);
  EXPECT_LE(cache.layer->n_blocks(), 2 * 3);
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
  check_all(*pool);
}

// As from a file that says more of its offset than it has tokens for.
TEST(PagedLayerAdopt, fewer_tokens_than_the_window_shows_are_not_trimmed_to_before_the_first) {
  const auto pool = make_pool(16);
  Cache cache = windowed(pool, 100);
  adopt(cache, 16, 4, 0);
  EXPECT_FALSE(cache.layer->is_trimmable());
  EXPECT_EQ(cache.layer->trim(20), 0);
  EXPECT_THROW(cache.layer->roll_back(5), InvalidArgument);
  EXPECT_EQ(cache.error(), 0);
  cache.append(1, 100);
  EXPECT_EQ(cache.layer->offset(), 21);
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
}

TEST(PagedLayerAdopt, tokens_that_never_come_are_taken_back_to_their_first_position) {
  const auto pool = make_pool(16);
  Cache cache = windowed(pool, 8);
  (void)cache.layer->adopt(4, 8);
  cache.layer->roll_back(8);
  EXPECT_EQ(cache.layer->n_blocks(), 0);
  EXPECT_EQ(cache.layer->trim(4), 0);
  cache.append(3, 100);
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
  check_all(*pool);
}

TEST(PagedLayerAdopt, one_layer_adopts_without_a_step_of_the_others) {
  const auto pool = make_pool(32);
  const auto group = std::make_shared<PagedGroup>(pool, 1);
  Cache layers[3];
  for (Cache& layer : layers) layer.layer = group->add_layer(small_spec());
  for (Cache& layer : layers) layer.append(5, 0);
  adopt(layers[2], 0, 5, 50);
  for (Cache& layer : layers) layer.append(1, 100);
  for (const Cache& layer : layers) {
    EXPECT_EQ(layer.layer->offset(), 6);
    EXPECT_EQ(layer.error(), 0);
  }
  group->check_invariants();
}

TEST(PagedLayerAdopt, a_torn_step_is_rolled_back_first) {
  const auto pool = make_pool(32);
  const auto group = std::make_shared<PagedGroup>(pool, 1);
  Cache layers[2];
  for (Cache& layer : layers) layer.layer = group->add_layer(small_spec());
  for (Cache& layer : layers) layer.append(3, 0);
  (void)layers[0].layer->append(4);
  adopt(layers[1], 0, 3, 50);
  EXPECT_EQ(layers[0].layer->offset(), 3);
  EXPECT_EQ(layers[0].error(), 0);
  EXPECT_EQ(layers[1].error(), 0);
  group->check_invariants();
}

TEST(PagedLayerAdopt, a_pool_that_is_too_small_leaves_the_layer_empty) {
  const auto pool = make_pool(4);
  Cache cache = make_cache(pool, 1);
  cache.append(5, 0);
  EXPECT_THROW((void)cache.layer->adopt(0, 9), StepExhausted);
  EXPECT_EQ(cache.layer->offset(), 0);
  EXPECT_EQ(cache.layer->n_blocks(), 0);
  cache.layer->group()->check_invariants();
  check_all(*pool);
}

TEST(PagedLayerAdopt, arguments_out_of_range_change_nothing) {
  const auto pool = make_pool(16);
  Cache plain = make_cache(pool, 1);
  plain.append(5, 0);
  EXPECT_THROW((void)plain.layer->adopt(4, 5), InvalidArgument);
  EXPECT_THROW((void)plain.layer->adopt(0, 0), InvalidArgument);
  Cache cache = windowed(pool, 6);
  EXPECT_THROW((void)cache.layer->adopt(3, 5), InvalidArgument);
  EXPECT_THROW((void)cache.layer->adopt(-4, 5), InvalidArgument);
  EXPECT_EQ(plain.error(), 0);
  check_all(*pool);
}

}  // namespace
}  // namespace kvpool::cache::testing
