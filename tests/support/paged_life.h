#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "unit/cache/paged_fixture.h"

namespace kvpool::cache::testing {

/// What a Life lives in.
struct LifeOptions {
  bool aged = false;  // fewer bits with age: numbers are near, not equal
  Format recent = Format::kFp32;
  std::int64_t n_layers = 1;
  std::int64_t window = 0;  // of every other layer, the first one included
  std::int64_t n_blocks = 64;
  std::int64_t max_blocks = 0;  // the pool grows to as many and shrinks again
  std::optional<std::int64_t> byte_budget;
};

/// Requests of several layers over one pool, beside a dense model: each request is the list of its
/// tokens, and a view shows for ever what was there when it was made.
///
/// Plans run late, in any order that keeps those of a layer in theirs, and those of a fork after
/// those of its origin from before; or never, where nobody reads what comes after. What runs is
/// what a view is checked against, not more: so nothing may depend on another layer's plans.
class Life {
 public:
  Life(const LifeOptions& options, unsigned seed) : options_(options), random_(seed) {
    for (std::int64_t i = 0; i < options.n_layers; ++i) {
      PagedLayerSpec spec = small_spec();
      spec.keys.recent = spec.values.recent = options.recent;
      if (i % 2 == 0) spec.window = options.window;
      if (options.aged) {
        spec.key_dim = spec.value_dim = 8;
        spec.keys.tiers = {{6, Format::kInt8, nullptr}};
        spec.values.tiers = {{0, Format::kBf16, nullptr}, {9, Format::kInt8, nullptr}};
      }
      specs_.push_back(spec);
    }
    core::PoolConfig config{
        .block_size = 4, .n_blocks = options.n_blocks, .separate_kv = seed % 2 == 1};
    if (options.max_blocks > 0) {
      config.grow_on_exhaustion = true;
      config.max_blocks = options.max_blocks;
    }
    pool_ =
        std::make_shared<PagedPool>(std::make_shared<BlockPoolAllocator>(config),
                                    storage::PageStoreOptions{.byte_budget = options.byte_budget});
    Request first;
    const auto group = std::make_shared<PagedGroup>(pool_, 0);
    for (const PagedLayerSpec& spec : specs_) first.layers.push_back({group->add_layer(spec)});
    requests_.push_back(std::move(first));
  }

  void step() {
    Request& request = requests_[below(requests_.size())];
    switch (below(16)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return append(request, 1);
      case 4:
        return append(request, 1 + number_below(11));
      case 5:
        return trim(request, number_below(7));
      case 6:
      case 7:
        return look(request);
      case 8:
        return check_one_reader();
      case 9:
        return fork(request);
      case 10:
      case 11:
        return run_some(1 + below(4));
      case 12:
        return tear(request);
      case 13:
        return withdraw(request);
      case 14:
        return end(request);
      default:
        return meddle(request);
    }
  }

  void check_books() {
    for (const Request& request : requests_) {
      group(request).check_invariants();
      if (request.torn) continue;
      for (const Held& held : request.layers) {
        ASSERT_EQ(held.layer->offset(), static_cast<std::int64_t>(request.tokens.size()));
      }
    }
    check_all(*pool_);
  }

  void check_views() {
    for (std::size_t i = readers_.size(); i-- > 0;) check(i);
    for (Request& request : requests_) {
      if (settle(request)) look(request);
    }
    for (std::size_t i = readers_.size(); i-- > 0;) check(i);
  }

  /// Checks everything, then drops it: nothing may be left.
  void finish() {
    check_views();
    requests_.clear();
    writes_.clear();
    check_all(*pool_);
    readers_.clear();
    check_all(*pool_);
    EXPECT_EQ(pool_->blocks().stats().blocks_in_use(), 0);
    EXPECT_EQ(pool_->store().stats(),
              (storage::PageStoreStats{.peak_used_bytes = pool_->store().stats().peak_used_bytes}));
  }

 private:
  using Tokens = std::vector<std::int64_t>;

  /// An append of one layer. Run, withdrawn (its rows will not come; what else it moves is moved
  /// once, whoever of the forks does it), or neither so far.
  struct Write {
    std::shared_ptr<const AppendPlan> plan;
    PagedLayerSpec spec;
    Tokens tokens;
    std::int64_t start = 0;
    std::shared_ptr<Write> before;
    std::shared_ptr<Write> instead_of;  // withdrawn
    bool run = false;
    bool withdrawn = false;
    bool moved = false;  // withdrawn, and the rest of the plan has run
  };
  struct Held {
    std::unique_ptr<PagedLayer> layer;
    std::shared_ptr<Write> last;
  };
  struct Request {
    std::vector<Held> layers;
    Tokens tokens;
    bool torn = false;
  };
  struct Reader {
    std::shared_ptr<const PageView> view;
    PagedLayerSpec spec;
    Tokens tokens;
    std::shared_ptr<Write> after;
  };

  static PagedGroup& group(const Request& request) { return *request.layers[0].layer->group(); }

  bool coarse() const {
    return options_.aged || formats::traits(options_.recent).kind != formats::Kind::kFloat;
  }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  std::int64_t number_below(std::size_t n) { return static_cast<std::int64_t>(below(n)); }

  Tokens fresh(std::int64_t n) {
    Tokens tokens;
    for (; n > 0; --n) tokens.push_back(next_token_++ % 512);
    return tokens;
  }

  // --- plans -------------------------------------------------------------------------------------

  void add_write(Held& held, std::shared_ptr<const AppendPlan> plan, const Tokens& tokens) {
    const std::int64_t start = held.layer->offset() - plan->n_tokens();
    held.last = std::make_shared<Write>(
        Write{std::move(plan), held.layer->spec(), tokens, start, held.last, nullptr});
    writes_.push_back(held.last);
  }

  /// What has not run up to `last`, oldest first.
  static std::vector<Write*> waiting(const std::shared_ptr<Write>& last) {
    std::vector<Write*> all;
    for (Write* write = last.get(); write != nullptr && !write->run; write = write->before.get()) {
      all.push_back(write);
    }
    std::reverse(all.begin(), all.end());
    return all;
  }

  /// False where rows are missing that will not come.
  static bool run(const std::shared_ptr<Write>& last) {
    for (Write* write : waiting(last)) {
      if (write->withdrawn) return false;
      write->run = true;
      if (write->instead_of != nullptr) {
        if (std::exchange(write->instead_of->moved, true)) continue;
        write->instead_of->plan->run_without_rows();
        write->instead_of->plan.reset();
      } else {
        Rows(write->spec).write(*write->plan, write->tokens);
      }
      write->plan.reset();
    }
    return true;
  }

  void run_some(std::size_t n) {
    for (; n > 0 && !writes_.empty(); --n) {
      std::swap(writes_[below(writes_.size())], writes_.back());
      if (below(8) != 0) (void)run(writes_.back());
      writes_.pop_back();
    }
  }

  /// A fork of its origin withdrew what this layer waits for, too.
  static bool is_late(const Held& held) {
    const auto all = waiting(held.last);
    return std::ranges::any_of(all, [](const Write* write) { return write->withdrawn; });
  }

  // --- what happens to requests ------------------------------------------------------------------

  /// Takes back what will not come. False where the request is empty for it.
  bool settle(Request& request) {
    if (std::exchange(request.torn, false)) group(request).roll_back_step();
    if (std::ranges::any_of(request.layers, is_late)) return take_back(request);
    return true;
  }

  /// What PagedLayerArrays does where the thread that was to evaluate appends has ended. All layers
  /// go back to where the one that lost most is.
  bool take_back(Request& request) {
    std::int64_t left = static_cast<std::int64_t>(request.tokens.size());
    for (Held& held : request.layers) {
      std::shared_ptr<Write> last = held.last;
      const auto lost = waiting(held.last);
      if (!lost.empty()) last = lost.front()->before;
      for (Write* write : lost) {
        left = std::min(left, write->start);
        if (write->instead_of != nullptr) {  // already a stand-in: it still has to run
          last = std::make_shared<Write>(Write{.before = last, .instead_of = write->instead_of});
          continue;
        }
        write->withdrawn = true;
        last = std::make_shared<Write>(Write{.before = last, .instead_of = owner_of(write, held)});
      }
      held.last = last;
      if (last != nullptr) writes_.push_back(last);
    }
    bool possible = true;
    for (const Held& held : request.layers) {
      possible = possible && held.layer->offset() - left <= held.layer->most_to_roll_back();
    }
    if (!possible) {
      group(request).release();
      clear(request);
      return false;
    }
    for (const Held& held : request.layers) held.layer->roll_back(held.layer->offset() - left);
    request.tokens.resize(static_cast<std::size_t>(left));
    return true;
  }

  static std::shared_ptr<Write> owner_of(const Write* write, const Held& held) {
    std::shared_ptr<Write> at = held.last;
    while (at.get() != write) at = at->before;
    return at;
  }

  static void clear(Request& request) {
    request.tokens.clear();
    request.torn = false;
    for (Held& held : request.layers) held.last = nullptr;  // its pages are others than before
  }

  void append(Request& request, std::int64_t n) {
    if (std::ranges::any_of(request.layers, is_late) && !settle(request)) return;
    const Tokens tokens = fresh(n);
    std::int64_t moved = 0;
    try {
      for (Held& held : request.layers) {
        add_write(held, held.layer->append(n), tokens);
        ++moved;
        request.torn = false;  // the first one took the step before back
      }
    } catch (const StepExhausted&) {
      ASSERT_EQ(moved, 0) << "a step ran out after its first layer";
      return;
    } catch (const LeaseLost&) {
      FAIL() << "blocks are gone that nobody freed";
    }
    request.tokens.insert(request.tokens.end(), tokens.begin(), tokens.end());
  }

  /// A step that does not reach the last layers.
  void tear(Request& request) {
    if (request.layers.size() == 1 || !settle(request)) return;
    const std::size_t reached = below(request.layers.size());
    const Tokens tokens = fresh(1 + number_below(6));
    try {
      for (std::size_t i = 0; i < reached; ++i) {
        Held& held = request.layers[i];
        add_write(held, held.layer->append(static_cast<std::int64_t>(tokens.size())), tokens);
        request.torn = true;
      }
    } catch (const StepExhausted&) {
      ASSERT_FALSE(request.torn) << "a step ran out after its first layer";
    }
  }

  void withdraw(Request& request) {
    if (below(3) != 0) return;
    if (settle(request)) (void)take_back(request);
  }

  void trim(Request& request, std::int64_t n) {
    if (!settle(request)) return;
    const auto size = static_cast<std::int64_t>(request.tokens.size());
    const bool closed = options_.window > 0 && size >= options_.window;
    std::int64_t dropped = 0;
    for (const Held& held : request.layers) dropped = held.layer->trim(n);
    ASSERT_EQ(dropped, closed ? 0 : std::min(n, size));
    request.tokens.resize(static_cast<std::size_t>(size - dropped));
  }

  void look(Request& request) {
    if (!settle(request)) return;
    const Held& held = request.layers[below(request.layers.size())];
    readers_.push_back({held.layer->view(), held.layer->spec(), request.tokens, held.last});
  }

  void check_one_reader() {
    if (readers_.empty()) return;
    const std::size_t i = below(readers_.size());
    check(i);
    if (::testing::Test::HasFatalFailure() || i >= readers_.size()) return;
    std::swap(readers_[i], readers_.back());
    readers_.pop_back();
  }

  /// A reader whose tokens will not come is dropped.
  void check(std::size_t i) {
    Reader& reader = readers_[i];
    if (!run(reader.after)) {
      std::swap(reader, readers_.back());
      readers_.pop_back();
      return;
    }
    const std::int64_t length = reader.view->length();
    const auto size = static_cast<std::int64_t>(reader.tokens.size());
    const std::int64_t window = reader.spec.window;
    ASSERT_GE(length, window == 0 ? size : std::min(window - 1, size));
    const Tokens kept(reader.tokens.end() - std::min(length, size), reader.tokens.end());
    // A group's numbers span 4; a page may be encoded more than once.
    ASSERT_LE(Rows(reader.spec).error_of(*reader.view, kept), coarse() ? 8.f : 0.f);
  }

  void fork(Request& request) {
    if (requests_.size() == kMaxRequests) return;
    const bool minted = below(2) == 0;
    const auto before = pool_->store().stats().used_bytes;
    auto layers =
        group(request).fork(minted ? std::nullopt : std::optional<OwnerId>(number_below(3)));
    ASSERT_EQ(pool_->store().stats().used_bytes, before) << "a fork took bytes";
    Request copy;
    copy.tokens = request.tokens;
    copy.torn = request.torn;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      copy.layers.push_back({std::move(layers[i]), request.layers[i].last});
    }
    requests_.push_back(std::move(copy));
  }

  void end(Request& request) {
    if (requests_.size() == 1 || below(2) != 0) return;
    std::swap(request, requests_.back());
    requests_.pop_back();
  }

  /// What comes from outside of the step.
  void meddle(Request& request) {
    switch (below(4)) {
      case 0:
        group(request).release();
        return clear(request);
      case 1: {
        const OwnerId owner = group(request).owner();
        pool_->blocks().free_all(owner);
        for (Request& other : requests_) {
          if (group(other).owner() == owner) expect_lost(other);
        }
        return;
      }
      case 2:
        if (options_.max_blocks == 0) return;
        for (const Stream stream : {Stream::kKey, Stream::kValue}) {
          pool_->blocks().shrink(pool_->blocks().config().separate_kv ? stream : Stream::kShared,
                                 number_below(8));
        }
        return;
      default:
        return adopt(request);
    }
  }

  void expect_lost(Request& request) {
    for (const Held& held : request.layers) {
      if (held.layer->n_blocks() > 0) {
        EXPECT_THROW((void)held.layer->append(1), LeaseLost);
        EXPECT_THROW((void)held.layer->view(), LeaseLost);
      }
    }
    group(request).release();
    clear(request);
  }

  /// Tokens of elsewhere in every layer.
  void adopt(Request& request) {
    (void)settle(request);
    const Tokens tokens = fresh(1 + number_below(20));
    group(request).release();
    clear(request);
    try {
      for (Held& held : request.layers) {
        auto plan = held.layer->adopt(0, static_cast<std::int64_t>(tokens.size()));
        add_write(held, std::move(plan), tokens);
      }
      request.tokens = tokens;
    } catch (const StepExhausted&) {
      group(request).release();
      clear(request);
    }
  }

  static constexpr std::size_t kMaxRequests = 5;

  LifeOptions options_;
  std::mt19937 random_;
  std::vector<PagedLayerSpec> specs_;
  std::shared_ptr<PagedPool> pool_;
  std::vector<Request> requests_;
  std::vector<Reader> readers_;
  std::vector<std::shared_ptr<Write>> writes_;
  std::int64_t next_token_ = 0;
};

}  // namespace kvpool::cache::testing
