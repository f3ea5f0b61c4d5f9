// What holds the layers of a request together: steps, exhaustion, release.
#include "kvpool/cache/paged_group.h"

#include <limits>
#include <random>
#include <thread>

#include "paged_fixture.h"

namespace kvpool::cache::testing {
namespace {

using ::testing::HasSubstr;

/// Layers that move together, each with its tokens.
struct Request {
  std::shared_ptr<PagedGroup> group;
  std::vector<Cache> layers;

  Request(const std::shared_ptr<PagedPool>& pool, OwnerId owner, int n_layers,
          const PagedLayerSpec& spec = small_spec())
      : group(std::make_shared<PagedGroup>(pool, owner)) {
    for (int i = 0; i < n_layers; ++i) layers.push_back({group->add_layer(spec), {}});
  }
  void step(std::int64_t n, std::int64_t first_token) {
    for (Cache& layer : layers) layer.append(n, first_token++);
    group->check_invariants();
  }
  float error() const {
    float error = 0;
    for (const Cache& layer : layers) error = std::max(error, layer.error());
    return error;
  }
};

TEST(PagedGroup, running_out_of_blocks_moves_no_layer) {
  const auto pool = make_pool(10);
  Request request(pool, 1, 3);
  request.step(4, 0);
  const auto used = pool->store().stats();
  try {
    request.layers[0].append(1, 9);
    FAIL();
  } catch (const StepExhausted& error) {
    EXPECT_EQ(error.shortage.needed, 6);
    EXPECT_EQ(error.shortage.available, 4);
    EXPECT_EQ(error.tokens_that_fit, 0);
    EXPECT_THAT(error.what(), HasSubstr("for 1 token in 3 layers; 0 tokens fit"));
  }
  for (const Cache& layer : request.layers) EXPECT_EQ(layer.layer->offset(), 4);
  EXPECT_EQ(pool->blocks().n_available(Stream::kShared), 4);
  EXPECT_EQ(pool->store().stats(), used);
  request.group->check_invariants();
  check_all(*pool);
  EXPECT_EQ(request.error(), 0);
}

TEST(PagedGroup, running_out_of_bytes_moves_no_layer) {
  const auto pool = make_pool(64, 4, true, 5 * (256 + 128));
  Request request(pool, 1, 3);
  request.step(4, 0);
  try {
    request.layers[0].append(1, 9);
    FAIL();
  } catch (const StepExhausted& error) {
    ASSERT_TRUE(error.bytes);
    EXPECT_EQ(error.shortage.owner, 1);
    EXPECT_EQ(error.tokens_that_fit, 0);
  }
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 6);
  EXPECT_EQ(pool->blocks().n_available(Stream::kKey), 29);
  EXPECT_EQ(pool->store().stats().used_bytes, 3 * (256 + 128));
  check_all(*pool);
}

TEST(PagedGroup, a_count_that_no_pool_has_room_for_asks_for_no_memory) {
  const auto pool = make_pool(16);
  for (const int n_layers : {1, 3}) {
    const auto group = std::make_shared<PagedGroup>(pool, 1);
    std::vector<std::unique_ptr<PagedLayer>> layers;
    for (int i = 0; i < n_layers; ++i) layers.push_back(group->add_layer(small_spec()));
    EXPECT_THROW((void)layers[0]->append(std::int64_t{1} << 48), StepExhausted);
    EXPECT_THROW((void)layers[0]->append((std::int64_t{1} << 48) + 1), InvalidArgument);
    EXPECT_THROW((void)layers[0]->append(std::numeric_limits<std::int64_t>::max()),
                 InvalidArgument);
    EXPECT_EQ(layers[0]->offset(), 0);
    group->check_invariants();
    check_all(*pool);
  }
}

TEST(PagedGroup, the_first_layer_reserves_for_all) {
  const auto pool = make_pool(8);
  Request request(pool, 1, 2);
  request.layers[0].append(5, 0);
  EXPECT_EQ(pool->blocks().n_available(Stream::kShared), 0);
  Request other(pool, 2, 1);
  EXPECT_THROW(other.step(1, 50), StepExhausted);
  request.layers[1].append(5, 10);
  EXPECT_EQ(request.error(), 0);
  EXPECT_EQ(pool->blocks().n_reserved(Stream::kShared, 1), 0);
  check_all(*pool);
}

TEST(PagedGroup, a_torn_step_is_rolled_back_by_the_next) {
  const auto pool = make_pool(64);
  Request request(pool, 1, 3);
  request.step(3, 0);
  request.layers[0].layer->append(6);
  request.layers[1].layer->append(6);
  EXPECT_TRUE(request.layers[0].layer->is_torn());
  EXPECT_FALSE(request.layers[2].layer->is_torn());
  request.step(2, 40);
  for (const Cache& layer : request.layers) EXPECT_EQ(layer.layer->offset(), 5);
  EXPECT_EQ(request.error(), 0);
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 12);
  check_all(*pool);
}

TEST(PagedGroup, a_torn_step_may_be_settled_or_trimmed) {
  const auto pool = make_pool(64);
  Request request(pool, 1, 2);
  request.step(3, 0);
  request.layers[0].layer->append(6);
  request.layers[0].layer->settle();
  EXPECT_EQ(request.layers[0].layer->offset(), 3);
  request.layers[0].layer->append(6);
  EXPECT_EQ(request.layers[0].layer->trim(1), 1);
  EXPECT_EQ(request.layers[1].layer->trim(1), 1);
  for (Cache& layer : request.layers) {
    EXPECT_EQ(layer.layer->offset(), 2);
    layer.tokens.resize(2);
  }
  EXPECT_EQ(request.error(), 0);
}

TEST(PagedGroup, a_layer_that_is_left_out_makes_no_step_torn) {
  const auto pool = make_pool(64);
  Request request(pool, 1, 3);
  for (int step = 0; step < 9; ++step) {
    request.layers[0].append(1, 10 * step);
    request.layers[2].append(1, 10 * step + 5);
  }
  EXPECT_EQ(request.layers[1].layer->offset(), 0);
  EXPECT_EQ(request.layers[2].layer->offset(), 9);
  EXPECT_EQ(request.error(), 0);
  request.group->roll_back_step();
  EXPECT_EQ(request.layers[0].layer->offset(), 8);
  EXPECT_EQ(pool->blocks().n_reserved(Stream::kShared, 1), 0);
  request.group->check_invariants();
  check_all(*pool);
}

TEST(PagedGroup, release_empties_every_layer_and_dropping_one_only_that) {
  const auto pool = make_pool(64);
  Request request(pool, 1, 3);
  request.step(6, 0);
  request.layers.erase(request.layers.begin() + 1);
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 8);
  EXPECT_EQ(request.group->nbytes(), 2 * 2 * (256 + 128));
  request.step(1, 30);
  EXPECT_EQ(request.error(), 0);
  request.layers[1].layer->release();
  EXPECT_EQ(request.group->n_blocks(), 0);
  EXPECT_EQ(pool->blocks().n_free(Stream::kShared), 64);
  EXPECT_EQ(pool->store().stats().committed_bytes, 0);
  for (Cache& layer : request.layers) layer.tokens.clear();
  request.step(3, 60);
  EXPECT_EQ(request.error(), 0);
}

TEST(PagedGroup, two_groups_of_one_owner_do_not_touch_each_others_blocks) {
  const auto pool = make_pool(64);
  Request first(pool, -1, 2);
  Request second(pool, -1, 2);
  first.step(5, 0);
  second.step(5, 50);
  first.group->release();
  EXPECT_EQ(second.error(), 0);
  second.step(5, 70);
  EXPECT_EQ(second.error(), 0);
  check_all(*pool);
}

TEST(PagedGroup, an_owners_own_reservation_is_drawn_on_and_the_rest_stays) {
  const auto pool = make_pool(16);
  Request request(pool, 1, 2);
  ASSERT_FALSE(pool->blocks().try_reserve(1, 5, 5));
  request.step(4, 0);
  EXPECT_EQ(pool->blocks().n_reserved(Stream::kShared, 1), 6);
  EXPECT_EQ(request.error(), 0);
}

TEST(PagedGroup, field_F18_each_layer_has_a_window_of_its_own) {
  const auto pool = make_pool(64);
  const auto group = std::make_shared<PagedGroup>(pool, 1);
  PagedLayerSpec narrow = small_spec();
  narrow.window = 4;
  std::vector<Cache> layers;
  layers.push_back({group->add_layer(narrow), {}});
  layers.push_back({group->add_layer(small_spec()), {}});
  for (int token = 0; token < 10; ++token) {
    for (Cache& layer : layers) layer.append(1, token);
  }
  EXPECT_EQ(layers[0].layer->view()->first_position(), 4);
  EXPECT_EQ(layers[1].layer->view()->length(), 10);
  EXPECT_EQ(layers[0].error(), 0);
  EXPECT_EQ(layers[1].error(), 0);
}

TEST(PagedGroup, a_step_that_does_not_fit_takes_what_lies_behind_its_window) {
  const auto pool = make_pool(2 * 4);
  PagedLayerSpec spec = small_spec();
  spec.window = 8;
  Cache cache = make_cache(pool, 1, spec);
  for (int i = 0; i < 4; ++i) cache.append(8, 10 * i);  // a chunk, and what its first token sees
  EXPECT_EQ(cache.error(), 0);
  EXPECT_EQ(pool->blocks().stats().n_exhausted, 0);
  // The step before is whole until one does not fit: then it can be rolled back no more.
  EXPECT_EQ(cache.layer->first_position(), 16);
  EXPECT_THROW(cache.append(12, 50), StepExhausted);
  EXPECT_EQ(cache.layer->offset(), 32);
  EXPECT_EQ(cache.layer->first_position(), 24);
  EXPECT_EQ(cache.error(), 0);
  EXPECT_THROW(cache.layer->roll_back(1), InvalidArgument);
  cache.append(8, 60);
  EXPECT_EQ(cache.error(), 0);
  check_all(*pool);
}

TEST(PagedGroup, field_F23_layers_are_trimmed_by_one_amount) {
  const auto pool = make_pool(64);
  Request request(pool, 1, 3);
  request.step(7, 0);
  request.layers[0].append(3, 20);
  request.layers[1].append(3, 30);
  request.group->roll_back_step();
  for (Cache& layer : request.layers) {
    layer.tokens.resize(7);
    EXPECT_EQ(layer.layer->trim(9), 7);
  }
}

TEST(PagedGroup, requests_run_in_threads_of_their_own) {
  const auto pool = make_pool(96, 4, false, 1 << 16);
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < 12; ++round) {
      Request request(pool, static_cast<OwnerId>(seed), 2);
      std::vector<std::shared_ptr<const PageView>> views;
      try {
        for (int step = 0; step < 12; ++step) {
          request.step(1 + random() % 4, 100 * step);
          views.push_back(request.layers[0].layer->view());
          if (step % 5 == 4) {
            const auto copies = request.group->fork();
            copies[0]->append(2);
          }
          ASSERT_EQ(request.error(), 0);
        }
      } catch (const StepExhausted&) {
        request.group->release();
      }
      // Its end comes in another thread.
      std::thread([moved = std::move(views)]() mutable { moved.clear(); }).join();
    }
  };
  std::thread other(work, 2);
  work(1);
  other.join();
  check_all(*pool);
  EXPECT_EQ(pool->blocks().stats().blocks_in_use(), 0);
  EXPECT_EQ(pool->store().stats().committed_bytes, 0);
}

TEST(PagedGroup, a_reader_in_another_thread_sees_what_was_there) {
  const auto pool = make_pool(64);
  Cache cache = make_cache(pool, 1);
  for (int round = 0; round < 40; ++round) {
    cache.append(1 + round % 3, 10 * round);
    const auto view = cache.layer->view();
    std::thread reader([view, rows = cache.rows(), tokens = cache.tokens] {
      EXPECT_EQ(rows.error_of(*view, tokens), 0);
    });
    const std::int64_t n = cache.layer->trim(round % 4);
    cache.tokens.resize(cache.tokens.size() - static_cast<std::size_t>(n));
    cache.append(2, 10 * round + 5);
    reader.join();
  }
  EXPECT_EQ(cache.error(), 0);
  cache.layer->group()->check_invariants();
}

}  // namespace
}  // namespace kvpool::cache::testing
