#include "kvpool/cache/lease_group.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <memory>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cache/layer_lease.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {
namespace {

using core::BlockPoolAllocator;
using core::PoolConfig;
using core::Stream;

/// Layers of one request over a pool with blocks of 4 tokens.
struct Request {
  explicit Request(PoolConfig config, int n_layers = 3,
                   BufferGrowth growth = BufferGrowth::exact(4), OwnerId owner = 1)
      : Request(std::make_shared<BlockPoolAllocator>(config), n_layers, growth, owner) {}
  Request(std::shared_ptr<BlockPoolAllocator> shared, int n_layers, BufferGrowth growth,
          OwnerId owner)
      : pool(std::move(shared)), group(std::make_shared<LeaseGroup>(pool, owner)) {
    for (int i = 0; i < n_layers; ++i) {
      layers.push_back(std::make_unique<LayerLease>(group, growth));
    }
  }

  void step(std::int64_t n_tokens) {
    for (auto& layer : layers) move(*layer, n_tokens);
  }
  static void move(LayerLease& layer, std::int64_t n_tokens) {
    ASSERT_TRUE(layer.append(1, n_tokens));
    layer.commit();
  }
  std::vector<std::int64_t> offsets() const {
    std::vector<std::int64_t> out;
    for (const auto& layer : layers) out.push_back(layer->offset());
    return out;
  }
  std::int64_t in_use() const { return pool->stats().blocks_in_use(); }
  void check() const {
    group->check_invariants();
    pool->check_invariants();
  }

  std::shared_ptr<BlockPoolAllocator> pool;
  std::shared_ptr<LeaseGroup> group;
  std::vector<std::unique_ptr<LayerLease>> layers;
};

PoolConfig blocks_of_four(std::int64_t n_blocks) { return {.block_size = 4, .n_blocks = n_blocks}; }

using Offsets = std::vector<std::int64_t>;

TEST(LeaseGroup, a_steps_growth_is_reserved_when_the_first_layer_moves) {
  Request request(blocks_of_four(12));
  request.move(*request.layers[0], 5);
  EXPECT_EQ(request.in_use(), 4);  // its own two blocks a stream, and no more
  EXPECT_EQ(request.pool->n_available(Stream::kKey), 0);
  EXPECT_EQ(request.pool->n_reserved(Stream::kValue, 1), 4);
  request.move(*request.layers[1], 5);
  request.move(*request.layers[2], 5);
  EXPECT_EQ(request.in_use(), 12);
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 0);
  request.check();
}

TEST(LeaseGroup, fault_F29_running_out_moves_no_layer_and_says_what_fits) {
  Request request(blocks_of_four(18), 3, BufferGrowth::spare(4, 4));
  request.step(5);
  try {
    (void)request.layers[0]->append(1, 8);
    FAIL() << "nine of nine blocks a stream would have had to be twelve";
  } catch (const StepExhausted& error) {
    EXPECT_EQ(error.tokens_that_fit, 7);
    EXPECT_NE(std::string(error.what()).find("7 tokens fit"), std::string::npos);
  }
  EXPECT_EQ(request.offsets(), (Offsets{5, 5, 5}));
  EXPECT_EQ(request.in_use(), 12);
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 0);
  request.step(7);
  EXPECT_EQ(request.offsets(), (Offsets{12, 12, 12}));
  request.check();
}

TEST(LeaseGroup, spare_growth_falls_back_to_what_is_there) {
  Request request(blocks_of_four(12), 3, BufferGrowth::spare(256, 4));
  request.step(5);
  EXPECT_EQ(request.layers[0]->shape().rows, 8);
  request.check();
  EXPECT_EQ(request.pool->stats().n_exhausted, 0);
}

TEST(LeaseGroup, spare_growth_takes_the_middle_way_before_single_blocks) {
  Request request(blocks_of_four(200), 1, BufferGrowth::spare(256, 4));
  request.step(200);
  EXPECT_EQ(request.layers[0]->shape().rows, 256);
  request.step(57);
  // 252 spare rows halved twice, in blocks: they leave as many of the 140 rows that are free.
  EXPECT_EQ(request.layers[0]->shape().rows, 260 + 64);
  request.check();
}

TEST(LeaseGroup, spare_rows_are_given_back_before_a_step_fails) {
  Request request(blocks_of_four(2 * 72), 1, BufferGrowth::spare(256, 4));
  request.step(4);  // the only layer yet: 256 rows of 288
  request.layers.push_back(
      std::make_unique<LayerLease>(request.group, BufferGrowth::ring(64, 0, 64)));
  request.layers[1]->replace(1, {4, 4, 4});
  EXPECT_THROW((void)request.layers[0]->append(1, 1), StepExhausted);
  ASSERT_TRUE(request.layers[0]->fits_tightened(1, 1));
  EXPECT_FALSE(request.layers[0]->fits_tightened(1, 200));
  EXPECT_EQ(request.layers[0]->tighten(), 4);
  EXPECT_EQ(request.layers[1]->tighten(), 4);
  request.step(1);
  EXPECT_EQ(request.layers[1]->shape().rows, 64);
  request.check();
}

// A pool sized for the tokens of a request holds them, whatever spare rows layers take on the way.
RC_GTEST_PROP(LeaseGroup, spare_rows_never_cost_the_request_a_token, ()) {
  const int n_plain = *rc::gen::inRange(1, 60);
  const int n_rings = *rc::gen::inRange(0, 12);
  const std::int64_t window = *rc::gen::inRange(1, 400);
  const std::int64_t prompt = *rc::gen::inRange(1, 200);
  const std::int64_t total = prompt + *rc::gen::inRange(1, 300);
  const std::int64_t ring_rows = std::min(total, window - 1 + prompt);
  const std::int64_t pairs = n_plain * ((total + 3) / 4) + n_rings * ((ring_rows + 3) / 4);
  Request request(blocks_of_four(2 * pairs), n_plain, BufferGrowth::spare(256, 4));
  for (int i = 0; i < n_rings; ++i) {
    request.layers.push_back(
        std::make_unique<LayerLease>(request.group, BufferGrowth::ring(window, 0, 256, 4)));
  }
  request.step(prompt);
  for (std::int64_t token = prompt; token < total; ++token) {
    try {
      (void)request.layers[0]->append(1, 1);
    } catch (const StepExhausted&) {
      RC_ASSERT(request.layers[0]->fits_tightened(1, 1));
      for (const auto& layer : request.layers) layer->tighten();
      RC_ASSERT(request.layers[0]->append(1, 1).has_value());
    }
    request.layers[0]->commit();
    for (std::size_t i = 1; i < request.layers.size(); ++i) request.move(*request.layers[i], 1);
  }
  RC_ASSERT(request.offsets() == Offsets(request.layers.size(), total));
  request.check();
}

TEST(LeaseGroup, a_layer_does_not_grow_early_where_the_others_could_not_follow) {
  Request request(blocks_of_four(3 * 2 * 64 + 2 * 100), 3, BufferGrowth::spare(256, 4));
  request.step(254);
  request.step(1);
  request.step(1);
  EXPECT_EQ(request.in_use(), 3 * 2 * 64);
  request.step(1);
  EXPECT_EQ(request.offsets(), (Offsets{257, 257, 257}));
  EXPECT_EQ(request.layers[0]->shape().rows, request.layers[2]->shape().rows);
  request.check();
}

TEST(LeaseGroup, layers_grow_one_after_the_other_where_there_is_room) {
  Request request(blocks_of_four(3 * 2 * 128), 3, BufferGrowth::spare(256, 4));
  request.step(254);
  EXPECT_EQ(request.in_use(), 3 * 2 * 64);
  for (const std::int64_t grown : {1, 2, 3}) {
    request.step(1);
    EXPECT_EQ(request.in_use(), (3 + grown) * 2 * 64);
  }
  request.check();
}

TEST(LeaseGroup, a_step_cut_short_is_torn_and_can_be_taken_back) {
  Request request(blocks_of_four(24));
  request.step(3);
  request.move(*request.layers[0], 2);
  request.move(*request.layers[1], 2);
  EXPECT_TRUE(request.layers[0]->is_torn());
  EXPECT_FALSE(request.layers[2]->is_torn());
  EXPECT_FALSE(request.layers[0]->append(1, 1));
  for (auto& layer : request.layers) layer->undo(layer->shape().rows);
  request.group->end_step();
  EXPECT_EQ(request.offsets(), (Offsets{3, 3, 3}));
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 0);
  request.step(1);
  EXPECT_EQ(request.offsets(), (Offsets{4, 4, 4}));
  request.check();
}

TEST(LeaseGroup, a_step_whose_last_layer_was_never_written_is_torn) {
  Request request(blocks_of_four(24), 2);
  request.step(3);
  request.move(*request.layers[0], 2);
  ASSERT_TRUE(request.layers[1]->append(1, 2));
  EXPECT_FALSE(request.layers[0]->append(1, 1));
  request.layers[0]->undo(7);
  request.layers[1]->undo(4);
  request.group->end_step();
  EXPECT_EQ(request.offsets(), (Offsets{3, 3}));
  EXPECT_EQ(request.layers[1]->shape().rows, 4);
  request.check();
}

TEST(LeaseGroup, the_last_step_can_be_taken_back_even_after_the_next_did_not_fit) {
  Request request(blocks_of_four(6), 1, BufferGrowth::ring(8, 0, 4));
  for (int i = 0; i < 10; ++i) request.step(1);
  EXPECT_THROW((void)request.layers[0]->append(1, 9), StepExhausted);
  EXPECT_EQ(request.layers[0]->trim(1), 0);  // the ring has wrapped
  EXPECT_EQ(request.layers[0]->undo(8), (BufferShape{9, 8, 1}));
  request.step(1);
  EXPECT_EQ(request.layers[0]->shape(), (BufferShape{10, 8, 2}));
  request.check();
}

TEST(LeaseGroup, a_layer_that_is_left_out_does_not_tear_the_step) {
  Request request(blocks_of_four(24));
  request.move(*request.layers[1], 2);
  request.move(*request.layers[1], 2);
  EXPECT_EQ(request.offsets(), (Offsets{0, 4, 0}));
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 2);  // for the step under way
  request.group->end_step();
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 0);
}

TEST(LeaseGroup, dropping_a_layer_gives_its_blocks_back_and_ends_a_step_that_waited_for_it) {
  Request request(blocks_of_four(24));
  request.move(*request.layers[0], 4);
  request.move(*request.layers[1], 4);
  request.layers.pop_back();
  EXPECT_EQ(request.in_use(), 4);
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 0);
  request.layers.pop_back();
  EXPECT_EQ(request.in_use(), 2);
  request.step(1);
  request.check();
}

TEST(LeaseGroup, release_empties_every_layer) {
  Request request(blocks_of_four(24));
  request.step(5);
  request.move(*request.layers[0], 7);
  request.group->release();
  EXPECT_EQ(request.in_use(), 0);
  EXPECT_EQ(request.offsets(), (Offsets{0, 0, 0}));
  EXPECT_EQ(request.pool->n_available(Stream::kKey), 12);
  EXPECT_FALSE(request.pool->is_active(1));
  request.step(1);
  request.check();
}

TEST(LeaseGroup, a_reservation_of_the_owner_is_drawn_on_and_survives_its_remainder) {
  Request request(blocks_of_four(24));
  ASSERT_FALSE(request.pool->try_reserve(1, 10, 10));
  request.step(8);
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 4);
  request.move(*request.layers[0], 4);  // 3 of the 4 are this step's
  request.layers[0]->undo(8);
  request.group->end_step();
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 4 - 1);
}

TEST(LeaseGroup, field_F23_all_layers_are_trimmed_by_what_the_shortest_can_drop) {
  Request request(blocks_of_four(60));
  request.layers[0]->replace(1, {10, 12, 10});
  request.layers[1]->replace(1, {10, 12, 10});
  request.layers[2]->replace(1, {7, 8, 7});
  for (auto& layer : request.layers) EXPECT_EQ(layer->trim(9), 7);
  EXPECT_EQ(request.offsets(), (Offsets{3, 3, 0}));
  request.check();
}

TEST(LeaseGroup, field_F1_a_negative_trim_is_refused) {
  Request request(blocks_of_four(24), 1);
  request.step(10);
  EXPECT_THROW((void)request.layers[0]->trim(-5), InvalidArgument);
  EXPECT_EQ(request.offsets(), (Offsets{10}));
}

TEST(LeaseGroup, replacements_of_all_layers_are_reserved_together) {
  Request request(blocks_of_four(24));
  request.step(4);
  EXPECT_TRUE(request.group->has_at_hand(9));
  EXPECT_FALSE(request.group->has_at_hand(10));
  EXPECT_THROW(request.group->prepare(10, "merge"), StepExhausted);
  request.check();
  request.group->prepare(9, "merge");
  EXPECT_EQ(request.pool->n_available(Stream::kKey), 0);
  for (auto& layer : request.layers) layer->replace(2, {8, 8, 8});
  EXPECT_EQ(request.in_use(), 24);
  request.group->end_step();
  EXPECT_EQ(request.pool->n_reserved(Stream::kKey, 1), 0);
  request.check();
}

TEST(LeaseGroup, a_layer_without_sequences_is_charged_by_its_next_step) {
  Request request(blocks_of_four(24));
  request.step(5);
  for (auto& layer : request.layers) layer->replace(0, {5, 8, 5});
  EXPECT_EQ(request.in_use(), 0);
  request.check();
  request.step(1);
  EXPECT_EQ(request.offsets(), (Offsets{6, 6, 6}));
  EXPECT_EQ(request.in_use(), 12);
  request.check();
}

TEST(LeaseGroup, field_D14_a_layer_that_is_superseded_goes_on_alone) {
  Request request(blocks_of_four(40));
  request.step(4);
  auto heir = request.layers[1]->supersede(BufferGrowth::exact(4), "int8");
  EXPECT_EQ(heir->shape(), (BufferShape{4, 4, 4}));
  EXPECT_EQ(request.in_use(), 6 + 2);
  std::swap(heir, request.layers[1]);
  heir.reset();
  EXPECT_EQ(request.in_use(), 6);
  request.step(1);
  EXPECT_EQ(request.offsets(), (Offsets{5, 5, 5}));
  EXPECT_EQ(request.group->n_layers(), 3);
  request.check();
}

TEST(LeaseGroup, a_layer_is_superseded_also_where_the_pool_is_full) {
  Request request(blocks_of_four(6));
  request.step(4);
  auto heir = request.layers[1]->supersede(BufferGrowth::exact(4), "int8");
  EXPECT_EQ(heir->shape(), (BufferShape{4, 4, 4}));
  EXPECT_EQ(request.layers[1]->shape(), BufferShape{});
  EXPECT_EQ(request.in_use(), 6);
  request.check();
}

TEST(LeaseGroup, fault_F39_a_copy_is_charged_to_its_own_owner) {
  Request request(blocks_of_four(40));
  request.step(4);
  auto group = std::make_shared<LeaseGroup>(request.pool, request.pool->new_owner());
  auto copy = request.layers[0]->copy_into(group);
  EXPECT_EQ(request.in_use(), 8);
  ASSERT_TRUE(copy->append(1, 1));
  EXPECT_EQ(request.offsets(), (Offsets{4, 4, 4}));
  copy.reset();
  EXPECT_EQ(request.in_use(), 6);
}

TEST(LeaseGroup, growth_of_the_pool_is_not_counted_twice) {
  // Five pairs are at hand or can be minted; keys and values draw on the same headroom.
  Request request({.block_size = 4, .n_blocks = 8, .grow_on_exhaustion = true, .max_blocks = 10},
                  1);
  try {
    (void)request.layers[0]->append(1, 24);
    FAIL();
  } catch (const StepExhausted& error) {
    EXPECT_EQ(error.tokens_that_fit, 20);
  }
  EXPECT_EQ(request.pool->stats().n_grown, 0);
  request.step(20);
  request.check();
}

RC_GTEST_PROP(LeaseGroup, the_books_hold_after_any_calls, ()) {
  const auto pool = std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = *rc::gen::inRange<std::int64_t>(1, 6),
                 .n_blocks = *rc::gen::inRange<std::int64_t>(2, 80),
                 .separate_kv = *rc::gen::arbitrary<bool>()});
  const auto growth = *rc::gen::element(BufferGrowth::exact(3), BufferGrowth::spare(8, 2),
                                        BufferGrowth::ring(7, 2, 4));
  Request request(pool, *rc::gen::inRange(1, 4), growth, 5);
  const auto n_calls = *rc::gen::inRange(1, 40);
  for (int i = 0; i < n_calls; ++i) {
    switch (*rc::gen::inRange(0, 4)) {
      case 0:
      case 1: {
        const auto before = request.offsets();
        const auto n = *rc::gen::inRange<std::int64_t>(1, 9);
        try {
          for (auto& layer : request.layers) {
            RC_ASSERT(layer->append(1, n).has_value());
            layer->commit();
          }
        } catch (const StepExhausted& error) {
          RC_ASSERT(error.tokens_that_fit < n);
          RC_ASSERT(request.offsets() == before);
        }
        break;
      }
      case 2: {
        const auto n = *rc::gen::inRange<std::int64_t>(0, 9);
        const auto before = request.offsets();
        for (std::size_t l = 0; l < request.layers.size(); ++l) {
          const auto dropped = request.layers[l]->trim(n);
          RC_ASSERT(request.layers[l]->offset() == before[l] - dropped);
        }
        break;
      }
      default:
        request.group->release();
    }
    request.check();
    RC_ASSERT(request.in_use() == request.group->n_blocks());
  }
  request.layers.clear();
  RC_ASSERT(request.in_use() == 0);
}

}  // namespace
}  // namespace kvpool::cache
