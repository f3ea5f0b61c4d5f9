#pragma once

#include <array>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/core/block_pool_allocator.h"
#include "support/naive_pool.h"

namespace kvpool::core::testing {

/// One call with small arguments; any bytes make a valid command.
struct Command {
  static constexpr std::size_t kSize = 6;
  std::array<std::uint8_t, kSize> bytes{};

  std::uint8_t operator[](std::size_t i) const { return bytes[i]; }
  friend std::ostream& operator<<(std::ostream& out, const Command& command) {
    for (std::uint8_t byte : command.bytes) out << static_cast<int>(byte) << ' ';
    return out;
  }
};

/// A small pool whose shape is any byte.
inline PoolConfig small_config(std::uint8_t shape, std::uint8_t size) {
  PoolConfig config;
  config.block_size = 1 + size % 4;
  config.n_blocks = 1 + size / 4 % 16;
  config.separate_kv = shape & 1;
  config.grow_on_exhaustion = shape & 2;
  if (shape & 4) config.max_blocks = config.n_blocks + shape / 8 % 8;
  return config;
}

/// A BlockPoolAllocator and its NaivePool, given the same calls: each step throws where their
/// answers or anything that can be asked of them differ, or where the pool's invariants break.
class PoolPair {
 public:
  explicit PoolPair(PoolConfig config) : config_(config), pool_(config), model_(config) {
    pool_.add_observer(observer_);
    for (OwnerId owner = -1; owner < 4; ++owner) owners_.push_back(owner);
    for (const char* name : kFormats) pool_.intern_format(name);
    compare();
  }

  void step(const Command& c) {
    model_.freed.clear();
    model_.retired.clear();
    observer_->freed.clear();
    observer_->retired.clear();
    switch (c[0] % 16) {
      case 0:
      case 1:
      case 2:
        allocate(c);
        break;
      case 3:
        allocate_kv(c);
        break;
      case 4:
      case 5:
        free(c);
        break;
      case 6:
        free_all(c);
        break;
      case 7:
        fork(c);
        break;
      case 8:
        writable(c);
        break;
      case 9:
        mark_used(c);
        break;
      case 10:
        set_format(c);
        break;
      case 11:
        reserve(c);
        break;
      case 12:
        shrink(c);
        break;
      case 13:
        registration(c);
        break;
      case 14:
        misuse(c);
        break;
      case 15:
        hand_made(c);
        break;
    }
    compare();
  }

 private:
  using Outcome = NaivePool::Outcome;
  using Ref = NaivePool::Ref;
  static constexpr const char* kFormats[] = {"fp16", "int8", "int4"};

  struct Collector : PoolObserver {
    void blocks_freed(std::span<const Event> events) noexcept override {
      for (const Event& event : events) freed.insert(value(event.id));
    }
    void blocks_retired(std::span<const Event> events) noexcept override {
      for (const Event& event : events) retired.insert(value(event.id));
    }
    std::multiset<std::uint32_t> freed;
    std::set<std::uint32_t> retired;
  };

  static void require(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("pool and model differ: " + what);
  }

  OwnerId owner(std::uint8_t pick) const { return owners_[pick % owners_.size()]; }
  Stream stream(std::uint8_t pick) const {
    return config_.separate_kv ? Stream(pick % 2) : Stream(pick % 3);
  }
  static FormatTag format(std::uint8_t pick) { return FormatTag{std::uint16_t(pick % 3)}; }

  /// Runs a call of the pool that may throw, where the model says what it must come to.
  template <typename Call>
  void expect(Outcome outcome, const char* what, Call&& call) {
    Outcome got = Outcome::kDone;
    try {
      if (call()) got = Outcome::kShort;
    } catch (const InvalidArgument&) {
      got = Outcome::kRefused;
    }
    require(got == outcome, std::string(what) + " came to " + std::to_string(int(got)) +
                                ", expected " + std::to_string(int(outcome)));
  }

  /// New handles belong to the references that the model made.
  void learn(const std::vector<Ref>& made, std::span<const BlockHandle> handles) {
    require(made.size() == handles.size(), "number of handles");
    handles_.resize(std::max(handles_.size(), made.empty() ? 0 : made.back() + 1));
    for (std::size_t i = 0; i < made.size(); ++i) {
      require(value(handles[i].id) == model_.reference(made[i]).id, "id of a new handle");
      handles_[made[i]] = handles[i];
    }
  }

  void allocate(const Command& c) {
    const std::int64_t n_tokens = 1 + c[1] % 13;
    const std::int64_t copies = 1 + c[5] % 3 / 2;
    const Stream which = stream(c[2]);
    std::vector<Ref> made;
    const Outcome outcome =
        model_.allocate({which}, n_tokens, owner(c[3]), {c[4] % 3}, copies, made);
    std::vector<BlockHandle> out(pool_.blocks_for_tokens(n_tokens) * copies);
    expect(outcome, "allocate", [&] {
      return pool_.try_allocate(which, n_tokens, owner(c[3]), format(c[4]), out, copies)
          .has_value();
    });
    if (outcome == Outcome::kDone) learn(made, out);
  }

  void allocate_kv(const Command& c) {
    const std::int64_t n_tokens = 1 + c[1] % 9;
    std::vector<Ref> made;
    const Outcome outcome = model_.allocate({Stream::kKey, Stream::kValue}, n_tokens, owner(c[3]),
                                            {c[4] % 3, c[5] % 3}, 1, made);
    const auto n = static_cast<std::size_t>(pool_.blocks_for_tokens(n_tokens));
    std::vector<BlockHandle> out(2 * n);
    expect(outcome, "allocate_kv", [&] {
      return pool_
          .try_allocate_kv(n_tokens, owner(c[3]), format(c[4]), format(c[5]),
                           std::span(out).first(n), std::span(out).last(n))
          .has_value();
    });
    if (outcome == Outcome::kDone) learn(made, out);
  }

  /// Up to five references, live or stale, the same one perhaps twice.
  std::vector<Ref> pick(const Command& c) const {
    std::vector<Ref> refs;
    for (std::size_t i = 1; i < Command::kSize && !handles_.empty(); ++i) {
      // Mostly recent ones, since most old ones are stale.
      const std::size_t back = c[i] < 192 ? c[i] % 24 : c[i];
      if (c[i] % 7 != 6) refs.push_back(handles_.size() - 1 - back % handles_.size());
    }
    return refs;
  }
  std::vector<BlockHandle> handles(const std::vector<Ref>& refs) const {
    std::vector<BlockHandle> result;
    for (Ref ref : refs) result.push_back(handles_[ref]);
    return result;
  }

  void free(const Command& c) {
    const std::vector<Ref> refs = pick(c);
    model_.free(refs);
    pool_.free(handles(refs));
  }

  void free_all(const Command& c) {
    require(model_.free_all(owner(c[1])) == pool_.free_all(owner(c[1])), "free_all's count");
  }

  void fork(const Command& c) {
    OwnerId to = owner(c[2]);
    if (c[3] % 4 == 0 && owners_.size() < 8) owners_.push_back(to = pool_.new_owner());
    std::vector<Ref> made;
    const Outcome outcome = model_.fork(owner(c[1]), to, made);
    std::vector<BlockHandle> got;
    expect(outcome, "fork", [&] {
      got = pool_.fork(owner(c[1]), to);
      return false;
    });
    if (outcome == Outcome::kDone) learn(made, got);
  }

  void writable(const Command& c) {
    const std::vector<Ref> refs = pick(c);
    if (refs.empty()) return;
    Ref made = 0;
    const Outcome outcome = model_.writable(refs[0], made);
    BlockHandle got;
    expect(outcome, "writable",
           [&] { return pool_.try_writable(handles_[refs[0]], got).has_value(); });
    if (outcome != Outcome::kDone) return;
    if (made == refs[0]) {
      require(got == handles_[made], "writable's handle of a block held alone");
    } else {
      learn({made}, {&got, 1});
    }
  }

  void mark_used(const Command& c) {
    const std::vector<Ref> refs = pick(c);
    const std::int64_t n_used = c[1] % (config_.block_size + 1);
    expect(model_.mark_used(refs, n_used), "mark_used", [&] {
      pool_.mark_used(handles(refs), n_used);
      return false;
    });
  }

  void set_format(const Command& c) {
    const std::vector<Ref> refs = pick(c);
    if (refs.empty()) return;
    expect(model_.set_format(refs[0], c[4] % 3), "set_format", [&] {
      pool_.set_format(handles_[refs[0]], format(c[4]));
      return false;
    });
  }

  void reserve(const Command& c) {
    const std::int64_t n_keys = c[2] % 5;
    const std::int64_t n_values = c[3] % 5;
    expect(model_.reserve(owner(c[1]), n_keys, n_values), "reserve",
           [&] { return pool_.try_reserve(owner(c[1]), n_keys, n_values).has_value(); });
  }

  void shrink(const Command& c) {
    require(model_.shrink(stream(c[1]), c[2] % 12) == pool_.shrink(stream(c[1]), c[2] % 12),
            "shrink's count");
  }

  void registration(const Command& c) {
    if (c[2] % 2) {
      expect(model_.register_owner(owner(c[1])), "register_owner", [&] {
        pool_.register_owner(owner(c[1]));
        return false;
      });
    } else {
      expect(model_.release_owner(owner(c[1])), "release_owner", [&] {
        pool_.release_owner(owner(c[1]));
        return false;
      });
    }
  }

  /// Arguments that no state of the pool allows.
  void misuse(const Command& c) {
    const std::int64_t bad = -static_cast<std::int64_t>(c[3]);
    const OwnerId unminted = std::numeric_limits<OwnerId>::min() + 8 + c[2];
    std::array<BlockHandle, 1> out;
    expect(Outcome::kRefused, "misuse", [&] {
      switch (c[1] % 8) {
        case 0:
          return pool_.try_allocate(stream(c[2]), bad, 1, {}, out).has_value();
        case 1:
          return pool_.try_allocate(stream(c[2]), 1, unminted, {}, out).has_value();
        case 2:
          return pool_.try_allocate(stream(c[2]), 1, 1, FormatTag{999}, out).has_value();
        case 3:
          return pool_.try_allocate(stream(c[2]), 1, 1, {}, {}).has_value();
        case 4:
          return pool_.try_reserve(1, 1, bad - 1).has_value();
        case 5:
          return pool_.shrink(stream(c[2]), bad - 1) >= 0;
        case 6:
          return pool_.register_owner(unminted), false;
        default:
          return pool_.fork(1, unminted), false;
      }
    });
  }

  /// A live handle changed in one field, after good ones in a list: refused before anything moves.
  void hand_made(const Command& c) {
    std::vector<Ref> refs = pick(c);
    if (refs.empty() || !model_.reference(refs.back()).live) return;
    std::vector<BlockHandle> list = handles(refs);
    BlockHandle& last = list.back();
    switch (c[1] % 7) {
      case 0:
        last.pool += 1;
        break;
      case 1:
        last.pool = 0;
        break;
      case 2:
        last.serial += 1'000'000;
        break;
      case 3:
        last.record += 1'000;
        break;
      case 4:
        last.reference += 1'000;
        break;
      case 5:
        last.id = BlockId{value(last.id) + 1};
        break;
      case 6:
        last.stream = last.stream == Stream::kKey ? Stream::kValue : Stream::kKey;
        break;
    }
    expect(Outcome::kRefused, "hand-made handle", [&] {
      pool_.free(list);
      return false;
    });
    expect(Outcome::kRefused, "hand-made handle", [&] { return pool_.info(last).has_value(); });
  }

  void compare() {
    pool_.check_invariants();
    require(pool_.stats() == model_.stats(), "stats");
    if (steps_++ % 16 == 0) compare_history();
    require(observer_->freed == model_.freed, "observed frees");
    require(observer_->retired == model_.retired, "observed retirements");
    for (int pick = 0; pick < (config_.separate_kv ? 2 : 1); ++pick) compare_stream(Stream(pick));
    for (OwnerId id : owners_) {
      require(pool_.is_active(id) == model_.is_active(id), "is_active");
      require(pool_.blocks_for(id) == handles(model_.refs_of(id)), "blocks_for");
    }
    for (Ref ref = 0; ref < handles_.size(); ++ref) compare_reference(ref);
  }

  void compare_history() {
    const std::vector<AllocationStats> history = pool_.history();
    require(std::equal(history.begin(), history.end(), model_.history().begin(),
                       model_.history().end()),
            "history");
  }

  void compare_stream(Stream which) {
    const int list = model_.list_of(which);
    require(pool_.n_free(which) == model_.n_free(list), "n_free");
    require(pool_.n_available(which) == model_.n_free(list) - model_.n_reserved(list),
            "n_available");
    for (OwnerId id : owners_) {
      require(pool_.n_reserved(which, id) == model_.n_reserved(list, id), "n_reserved");
      if (!config_.grow_on_exhaustion || config_.max_blocks) {
        require(pool_.n_allocatable(which, id) == model_.n_allocatable(list, id), "n_allocatable");
      }
    }
  }

  void compare_reference(Ref ref) {
    const NaivePool::Reference& expected = model_.reference(ref);
    const std::optional<BlockInfo> info = pool_.info(handles_[ref]);
    require(info.has_value() == expected.live, "whether a handle is live");
    if (!info) return;
    const NaivePool::Block& block = model_.block(expected.id);
    require(value(info->id) == expected.id && info->owner == expected.owner, "whose a block is");
    require(info->n_used == block.n_used, "n_used");
    require(info->n_references == block.references, "n_references");
    require(static_cast<int>(info->format) == block.format, "format");
    require(config_.separate_kv ? static_cast<int>(info->stream) == block.list
                                : info->stream == Stream::kShared,
            "stream");
  }

  PoolConfig config_;
  std::shared_ptr<Collector> observer_ = std::make_shared<Collector>();
  BlockPoolAllocator pool_;
  NaivePool model_;
  std::vector<OwnerId> owners_;
  int steps_ = 0;
  std::vector<BlockHandle> handles_;  // by the model's number of the reference
};

}  // namespace kvpool::core::testing
