// Random lives of paged caches against a dense model: each cache is the list of its tokens, and a
// view shows for ever what was there when it was made.
#include <deque>
#include <random>

#include "paged_fixture.h"

namespace kvpool::cache::testing {
namespace {

#ifdef __SANITIZE_THREAD__  // one thread has no races to show, and runs slowly
constexpr int kSequences = 10;
#else
constexpr int kSequences = 60;
#endif
constexpr int kSteps = 250;
constexpr std::size_t kMaxCaches = 5;

struct Reader {
  std::shared_ptr<const PageView> view;
  std::vector<std::int64_t> tokens;
};

struct Options {
  bool aged = false;  // int8 after some tokens: numbers are near, not equal
  std::int64_t window = 0;
  std::int64_t n_blocks = 64;
  std::optional<std::int64_t> byte_budget;
};

class Life {
 public:
  Life(const Options& options, unsigned seed)
      : options_(options), random_(seed), spec_(small_spec()) {
    spec_.window = options.window;
    if (options.aged) {
      spec_.key_dim = spec_.value_dim = 8;
      spec_.keys.tiers = {{6, Format::kInt8, nullptr}};
      spec_.values.tiers = {{0, Format::kBf16, nullptr}, {9, Format::kInt8, nullptr}};
    }
    pool_ = make_pool(options.n_blocks, 4, seed % 2 == 1, options.byte_budget);
    caches_.push_back(make_cache(pool_, 0, spec_));
  }

  void step() {
    Cache& cache = caches_[below(caches_.size())];
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return append(cache, 1);
      case 4:
        return append(cache, 1 + static_cast<std::int64_t>(below(11)));
      case 5: {
        const std::int64_t n = cache.layer->trim(static_cast<std::int64_t>(below(7)));
        cache.tokens.resize(cache.tokens.size() - static_cast<std::size_t>(n));
        return;
      }
      case 6:
      case 7:
        return readers_.push_back({cache.layer->view(), cache.tokens});
      case 8:
        if (!readers_.empty()) {
          std::swap(readers_[below(readers_.size())], readers_.back());
          check(readers_.back());
          readers_.pop_back();
        }
        return;
      case 9: {
        if (caches_.size() == kMaxCaches) return;
        const auto group = below(2) == 0
                               ? std::make_shared<PagedGroup>(pool_, static_cast<OwnerId>(below(3)))
                               : std::make_shared<PagedGroup>(pool_, pool_->blocks().new_owner());
        Cache copy{cache.layer->fork(group), cache.tokens};
        caches_.push_back(std::move(copy));
        return;
      }
      case 10:
        if (below(3) != 0) return run_plans(1 + below(4));
        cache.layer->reset();
        cache.tokens.clear();
        return;
      case 11:
        if (caches_.size() > 1 && below(2) == 0) {
          std::swap(cache, caches_.back());
          caches_.pop_back();
        }
        return;
    }
  }

  void check_everything() {
    for (const Cache& cache : caches_) {
      ASSERT_EQ(cache.layer->offset(), static_cast<std::int64_t>(cache.tokens.size()));
      cache.layer->group()->check_invariants();
    }
    check_all(*pool_);
    if (below(5) != 0) return;
    for (const Reader& reader : readers_) check(reader);
    for (const Cache& cache : caches_) check({cache.layer->view(), cache.tokens});
  }

  void end() {
    for (const Reader& reader : readers_) check(reader);
    caches_.clear();
    pending_.clear();
    check_all(*pool_);
    readers_.clear();
    check_all(*pool_);
    EXPECT_EQ(pool_->blocks().stats().blocks_in_use(), 0);
    EXPECT_EQ(pool_->store().stats(),
              (storage::PageStoreStats{.peak_used_bytes = pool_->store().stats().peak_used_bytes}));
  }

 private:
  struct Pending {
    std::shared_ptr<const AppendPlan> plan;
    std::vector<std::int64_t> tokens;
  };

  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }

  void append(Cache& cache, std::int64_t n) {
    std::shared_ptr<const AppendPlan> plan;
    try {
      plan = cache.layer->append(n);
    } catch (const StepExhausted&) {
      return;
    }
    std::vector<std::int64_t> fresh;
    for (std::int64_t i = 0; i < n; ++i) fresh.push_back(next_token_++ % 512);
    cache.tokens.insert(cache.tokens.end(), fresh.begin(), fresh.end());
    pending_.push_back({std::move(plan), std::move(fresh)});
  }

  // Plans run late, in the order in which they were made.
  void run_plans(std::size_t n) {
    for (; n > 0 && !pending_.empty(); --n) {
      Rows(spec_).write(*pending_.front().plan, pending_.front().tokens);
      pending_.pop_front();
    }
  }

  void check(const Reader& reader) {
    run_plans(pending_.size());
    const std::int64_t length = reader.view->length();
    const std::vector<std::int64_t> kept(reader.tokens.end() - length, reader.tokens.end());
    ASSERT_GE(static_cast<std::int64_t>(kept.size()),
              std::min<std::int64_t>(options_.window == 0 ? 1 << 20 : options_.window,
                                     static_cast<std::int64_t>(reader.tokens.size())));
    // 64 numbers in a group span 4; a page may be encoded more than once.
    ASSERT_LE(Rows(spec_).error_of(*reader.view, kept), options_.aged ? 8.f : 0.f);
  }

  Options options_;
  std::mt19937 random_;
  PagedLayerSpec spec_;
  std::shared_ptr<PagedPool> pool_;
  std::vector<Cache> caches_;
  std::vector<Reader> readers_;
  std::deque<Pending> pending_;
  std::int64_t next_token_ = 0;
};

void live(const Options& options) {
  for (int sequence = 0; sequence < kSequences; ++sequence) {
    SCOPED_TRACE(sequence);
    Life life(options, static_cast<unsigned>(sequence));
    for (int i = 0; i < kSteps; ++i) {
      SCOPED_TRACE(i);
      ASSERT_NO_THROW(life.step());
      ASSERT_NO_THROW(life.check_everything());
      if (::testing::Test::HasFatalFailure()) return;
    }
    life.end();
  }
}

TEST(PagedProperty, views_show_what_the_dense_model_held) { live({}); }

TEST(PagedProperty, they_do_in_a_pool_that_runs_out_of_blocks) { live({.n_blocks = 20}); }

TEST(PagedProperty, they_do_in_a_pool_that_runs_out_of_bytes) { live({.byte_budget = 4096}); }

TEST(PagedProperty, they_do_behind_a_window) { live({.window = 7, .n_blocks = 40}); }

TEST(PagedProperty, they_do_while_blocks_age) { live({.aged = true}); }

TEST(PagedProperty, they_do_while_blocks_age_behind_a_window_and_bytes_run_out) {
  live({.aged = true, .window = 21, .byte_budget = 8192});
}

}  // namespace
}  // namespace kvpool::cache::testing
