#include "kvpool/cache/paged_layer.h"

#include "paged_fixture.h"

namespace kvpool::cache::testing {
namespace {

using ::testing::HasSubstr;

std::string message_of(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PagedLayer, tokens_are_read_where_they_were_written) {
  const auto pool = make_pool(16);
  Cache cache = make_cache(pool, 1);
  cache.append(1, 100);
  cache.append(6, 200);
  cache.append(1, 300);
  EXPECT_EQ(cache.error(), 0);
  EXPECT_EQ(cache.layer->offset(), 8);
  EXPECT_EQ(cache.layer->n_blocks(), 4);
  EXPECT_EQ(cache.layer->nbytes(), 2 * (128 * 2) + 2 * 128);
  cache.append(1, 400);
  EXPECT_EQ(cache.layer->n_blocks(), 6);
  EXPECT_EQ(cache.layer->view()->last_page_len(), 1);
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
  check_all(*pool);
  cache.layer.reset();
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 16);
  EXPECT_EQ(pool->store().stats().committed_bytes, 0);
}

TEST(PagedLayer, separate_streams_take_keys_and_values_from_their_own_lists) {
  const auto pool = make_pool(9, 4, true);  // 5 of keys, 4 of values
  Cache cache = make_cache(pool, 1);
  cache.append(16, 0);
  EXPECT_EQ(pool->blocks().n_free(Stream::kKey), 1);
  EXPECT_THAT(
      message_of([&] { cache.append(1, 16); }),
      HasSubstr("[PagedKVCache::update_and_fetch] stream v needs 1 block, 0 free of 4 for 1 "
                "token in 1 layer; 0 tokens fit"));
  EXPECT_EQ(cache.error(), 0);
  check_all(*pool);
}

TEST(PagedLayer, arguments_out_of_range_are_refused) {
  const auto pool = make_pool(4);
  const auto group = std::make_shared<PagedGroup>(pool, 1);
  const auto refusal = [&](auto change) {
    PagedLayerSpec spec = small_spec();
    change(spec);
    return message_of([&] { group->add_layer(spec); });
  };
  EXPECT_EQ(refusal([](auto& s) { s.key_dim = 0; }), "[PagedLayer] key_dim must be >= 1, got 0");
  EXPECT_EQ(refusal([](auto& s) { s.window = -1; }), "[PagedLayer] window must be >= 0, got -1");
  EXPECT_THAT(refusal([](auto& s) { s.keys.recent = Format::kInt1; }),
              HasSubstr("[PagedLayer keys] format must be one that a page can have"));
  EXPECT_THAT(refusal([](auto& s) {
                s.values.tiers = {{8, Format::kFp16, nullptr}, {8, Format::kInt8, nullptr}};
              }),
              HasSubstr("[PagedLayer] values tiers must be of rising after_tokens"));
  EXPECT_THAT(refusal([](auto& s) { s.keys.tiers = {{8, Format::kFp32, nullptr}}; }),
              HasSubstr("[PagedLayer] keys tier fp32 takes 256 bytes a block"));
  EXPECT_EQ(group->n_layers(), 0);
  Cache cache = make_cache(pool, 1);
  EXPECT_EQ(message_of([&] { cache.layer->append(0); }),
            "[PagedLayer::append] n_tokens must be >= 1, got 0");
  EXPECT_EQ(message_of([&] { cache.layer->trim(-1); }),
            "[PagedLayer::trim] n must be >= 0, got -1");
}

TEST(PagedLayer, trim_gives_blocks_back_and_goes_on_in_the_same_page) {
  const auto pool = make_pool(16);
  Cache cache = make_cache(pool, 1);
  cache.append(11, 0);
  EXPECT_EQ(cache.layer->trim(5), 5);
  cache.tokens.resize(6);
  EXPECT_EQ(cache.layer->n_blocks(), 4);
  cache.layer->group()->check_invariants();
  const auto plan = cache.layer->append(1);
  EXPECT_TRUE(plan->keys().copies.empty());  // nobody sees the trimmed tokens
  cache.rows().write(*plan, {77});
  cache.tokens.push_back(77);
  EXPECT_EQ(cache.error(), 0);
  EXPECT_EQ(cache.layer->trim(25), 7);  // field F2: past zero
  EXPECT_EQ(cache.layer->offset(), 0);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 16);
  check_all(*pool);
}

TEST(PagedLayer, field_E15_a_full_pool_still_has_the_room_in_tails) {
  const auto pool = make_pool(4, 16);
  Cache cache = make_cache(pool, 1);
  cache.append(17, 0);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 0);
  EXPECT_THROW(cache.append(16, 17), StepExhausted);
  cache.append(15, 17);
  EXPECT_EQ(cache.error(), 0);
}

TEST(PagedLayer, blocks_freed_behind_it_are_a_typed_error_until_release) {
  const auto pool = make_pool(16);
  Cache cache = make_cache(pool, 1);
  cache.append(6, 0);
  EXPECT_EQ(pool->blocks().free_all(1), 4);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 16);
  EXPECT_THROW(cache.append(1, 6), LeaseLost);
  EXPECT_THROW(cache.layer->view(), LeaseLost);
  EXPECT_THROW(cache.layer->trim(1), LeaseLost);
  EXPECT_THROW(cache.layer->fork(cache.layer->group()), LeaseLost);
  cache.layer->release();
  cache.tokens.clear();
  cache.append(6, 50);
  EXPECT_EQ(cache.error(), 0);
  check_all(*pool);
}

TEST(PagedLayer, a_block_freed_behind_it_among_others_is_found_by_the_next_view) {
  const auto pool = make_pool(16);
  Cache cache = make_cache(pool, 1);
  cache.append(10, 0);
  const std::vector<core::BlockHandle> blocks = pool->blocks().blocks_for(1);
  pool->blocks().free(std::span(blocks).first(1));
  EXPECT_THROW(cache.layer->view(), LeaseLost);
  cache.layer->release();
  check_all(*pool);
}

TEST(PagedLayer, a_block_that_was_trimmed_into_ages_again) {
  const auto pool = make_pool(16);
  PagedLayerSpec spec = small_spec();
  spec.keys.tiers = spec.values.tiers = {{0, Format::kFp16, nullptr}};
  Cache cache = make_cache(pool, 1, spec);
  cache.append(8, 0);
  const std::int64_t bytes = cache.layer->nbytes();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cache.layer->trim(1), 1);
    cache.tokens.pop_back();
    cache.append(1, 12 + i);
    EXPECT_EQ(cache.layer->nbytes(), bytes);
  }
  cache.append(8, 16);
  EXPECT_EQ(cache.layer->nbytes(), 2 * bytes);
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
}

TEST(PagedLayer, bytes_may_end_before_blocks) {
  const auto pool = make_pool(64, 4, false, 3 * (256 + 128));
  Cache cache = make_cache(pool, 1);
  cache.append(5, 0);
  try {
    cache.append(8, 5);
    FAIL();
  } catch (const StepExhausted& error) {
    ASSERT_TRUE(error.bytes);
    EXPECT_EQ(error.bytes->needed, 2 * 256);
    EXPECT_EQ(error.bytes->available, 256 + 128);
    EXPECT_EQ(error.tokens_that_fit, 7);
    EXPECT_STREQ(error.what(),
                 "[PagedKVCache::update_and_fetch] 512 bytes are needed, 384 are left of the byte "
                 "budget of 1152 for 8 tokens in 1 layer; 7 tokens fit");
  }
  EXPECT_EQ(pool->store().stats().used_bytes, 2 * (256 + 128));
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 4);
  cache.append(7, 5);
  EXPECT_EQ(cache.error(), 0);
  check_all(*pool);
}

TEST(PagedLayer, rows_that_never_come_are_rolled_back) {
  const auto pool = make_pool(16);
  Cache cache = make_cache(pool, 1);
  cache.append(3, 0);
  const auto plan = cache.layer->append(4);
  plan->run_without_rows();
  cache.layer->roll_back(4);
  EXPECT_EQ(cache.error(), 0);
  cache.append(2, 9);
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
}

}  // namespace
}  // namespace kvpool::cache::testing
