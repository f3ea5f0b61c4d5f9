// Random lives of paged caches against a dense model.
#include <gtest/gtest.h>

#include "support/paged_life.h"

namespace kvpool::cache::testing {
namespace {

#ifdef __SANITIZE_THREAD__  // one thread has no races to show, and runs slowly
constexpr unsigned kLives = 8;
#else
constexpr unsigned kLives = 24;
#endif
constexpr int kSteps = 250;

void live(const LifeOptions& options) {
  for (unsigned seed = 0; seed < kLives; ++seed) {
    SCOPED_TRACE(seed);
    Life life(options, seed);
    for (int i = 0; i < kSteps; ++i) {
      SCOPED_TRACE(i);
      ASSERT_NO_THROW(life.step());
      if (::testing::Test::HasFatalFailure()) return;
      ASSERT_NO_THROW(life.check_books());
      if (i % 16 == 15) {
        ASSERT_NO_THROW(life.check_views());
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
    life.finish();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(PagedProperty, views_show_what_the_dense_model_held) { live({}); }

TEST(PagedProperty, they_do_where_layers_move_together) { live({.n_layers = 3, .n_blocks = 160}); }

TEST(PagedProperty, they_do_in_a_pool_that_runs_out_of_blocks) {
  live({.n_layers = 2, .n_blocks = 30});
}

TEST(PagedProperty, they_do_in_a_pool_that_runs_out_of_bytes) {
  live({.n_layers = 2, .byte_budget = 6144});
}

TEST(PagedProperty, they_do_in_a_pool_that_grows_and_shrinks) {
  live({.n_layers = 2, .n_blocks = 8, .max_blocks = 60});
}

TEST(PagedProperty, they_do_behind_windows) { live({.n_layers = 3, .window = 7, .n_blocks = 120}); }

TEST(PagedProperty, they_do_in_pages_of_codes) {
  live({.recent = Format::kInt8, .n_layers = 2, .window = 9, .n_blocks = 120});
}

TEST(PagedProperty, they_do_while_blocks_age) { live({.aged = true, .n_layers = 2}); }

TEST(PagedProperty, they_do_while_blocks_age_behind_windows_and_bytes_run_out) {
  live({.aged = true, .n_layers = 3, .window = 21, .byte_budget = 16384});
}

}  // namespace
}  // namespace kvpool::cache::testing
