#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/cache/lease_errors.h"
#include "kvpool/cache/page_view.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/cache/paged_pool.h"
#include "kvpool/cache/paged_sequence.h"

namespace kvpool::cache::testing {

/// Paged sequences beside a naive model, driven by commands: the model of a sequence is the list of
/// its tokens, and attention over it is the sum that defines it. A difference, or a broken
/// invariant, leaves as an exception.
class SequenceModel {
 public:
  static constexpr std::size_t kConfigSize = 4;
  static constexpr std::size_t kCommandSize = 4;

  /// Any bytes are a pool and layers: block size, formats, windows, and budgets that run out.
  explicit SequenceModel(std::span<const std::uint8_t, kConfigSize> bytes) {
    const std::int64_t block_size = std::int64_t{1} << bytes[0] % 5;
    const std::int64_t n_blocks = 2 + bytes[1] % 62;
    std::optional<std::int64_t> byte_budget;
    if (bytes[2] % 4 == 0) byte_budget = 512 * (1 + bytes[2] / 4);
    pool_ = std::make_shared<PagedPool>(
        std::make_shared<core::BlockPoolAllocator>(core::PoolConfig{
            .block_size = block_size, .n_blocks = n_blocks, .separate_kv = bytes[1] >= 128}),
        storage::PageStoreOptions{.byte_budget = byte_budget});
    aged_ = bytes[3] % 2 != 0;
    const int n_layers = 1 + bytes[3] / 2 % 3;
    for (int i = 0; i < n_layers; ++i) {
      PagedLayerSpec spec;
      spec.n_kv_heads = kKvHeads;
      spec.key_dim = kKeyDim;
      spec.value_dim = kValueDim;
      spec.keys.recent = spec.values.recent = formats::Format::kFp32;
      if (aged_) {
        spec.keys.tiers = {{6, formats::Format::kFp16, nullptr},
                           {14, formats::Format::kInt8, nullptr}};
        spec.values.tiers = {{0, formats::Format::kInt8, nullptr}};
      }
      // Every other layer of some sequences sees a window alone.
      if (i % 2 == 1 && bytes[3] % 16 >= 8) spec.window = 1 + bytes[3] / 16;
      specs_.push_back(spec);
    }
    entries_.push_back({PagedSequence(pool_, 0, specs_), {}});
  }

  void step(std::span<const std::uint8_t, kCommandSize> command) {
    const auto [op, which, a, b] = std::array{command[0], command[1], command[2], command[3]};
    Entry& entry = entries_[which % entries_.size()];
    switch (op % 12) {
      case 0:
      case 1:
      case 2:
        append(entry, 1 + a % 3);
        break;
      case 3:
        append(entry, 1 + a % 40);
        break;
      case 4:
        tear(entry, 1 + a % 5, b);
        break;
      case 5:
        trim(entry, a % 24);
        break;
      case 6:
        fork(entry, a);
        break;
      case 7:
        if (entries_.size() > 1) {
          std::swap(entry, entries_.back());
          entries_.pop_back();
        }
        break;
      case 8:
        if (a % 4 != 0) break;
        entry.sequence.release();
        entry.tokens.clear();
        break;
      case 9:
        attend(entry, b, 1 + a % 16);
        break;
      case 10:
        if (readers_.size() == kMaxReaders) break;
        readers_.push_back({entry.sequence.layer(b % n_layers()).view(), entry.tokens});
        break;
      case 11:
        if (readers_.empty()) break;
        std::swap(readers_[a % readers_.size()], readers_.back());
        check(readers_.back());
        readers_.pop_back();
        break;
    }
    check_books();
  }

  /// Reads everything, then drops it: nothing may be left.
  void finish() {
    for (const Reader& reader : readers_) check(reader);
    for (Entry& entry : entries_) {
      for (std::int64_t layer = 0; layer < n_layers(); ++layer) {
        check({entry.sequence.layer(layer).view(), entry.tokens});
      }
    }
    entries_.clear();
    check_books();
    readers_.clear();
    check_books();
    require(pool_->blocks().stats().blocks_in_use() == 0, "blocks are left");
    require(pool_->store().stats().used_bytes == 0, "bytes are left");
  }

 private:
  static constexpr std::int64_t kKvHeads = 2;
  static constexpr std::int64_t kQHeads = 6;
  static constexpr std::int64_t kKeyDim = 12;
  static constexpr std::int64_t kValueDim = 8;
  static constexpr std::size_t kMaxEntries = 6;
  static constexpr std::size_t kMaxReaders = 16;

  /// A token's number; its keys and values follow from that.
  using Tokens = std::vector<std::uint32_t>;
  struct Entry {
    PagedSequence sequence;
    Tokens tokens;
  };
  struct Reader {
    std::shared_ptr<const PageView> view;
    Tokens tokens;
  };

  static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("[SequenceModel] ") + what);
  }

  std::int64_t n_layers() const { return static_cast<std::int64_t>(specs_.size()); }

  /// In -1 .. 1, the same in all layers.
  static float number(std::uint32_t token, std::uint32_t stream, std::int64_t head,
                      std::int64_t dim) {
    std::uint32_t bits = token * 0x9e3779b1u + stream * 0x85ebca77u +
                         static_cast<std::uint32_t>(head * 64 + dim) * 0xc2b2ae3du;
    bits = (bits ^ bits >> 15) * 0x2c1b3c6du;
    return static_cast<float>(static_cast<std::int32_t>(bits ^ bits >> 13)) * 0x1p-31f;
  }

  /// [heads, tokens, dim]
  static std::vector<float> rows(std::span<const std::uint32_t> tokens, std::uint32_t stream,
                                 std::int64_t heads, std::int64_t dim) {
    std::vector<float> numbers;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (const std::uint32_t token : tokens) {
        for (std::int64_t d = 0; d < dim; ++d) numbers.push_back(number(token, stream, h, d));
      }
    }
    return numbers;
  }

  static kernels::SourceRows source(const std::vector<float>& numbers, std::size_t n,
                                    std::int64_t dim) {
    return {reinterpret_cast<const std::byte*>(numbers.data()), formats::Format::kFp32,
            static_cast<std::int64_t>(n) * dim, dim};
  }

  void append_layer(Entry& entry, std::int64_t layer, const Tokens& fresh) {
    const auto keys = rows(fresh, 0, kKvHeads, kKeyDim);
    const auto values = rows(fresh, 1, kKvHeads, kValueDim);
    entry.sequence.append(layer, static_cast<std::int64_t>(fresh.size()),
                          source(keys, fresh.size(), kKeyDim),
                          source(values, fresh.size(), kValueDim));
  }

  Tokens fresh_tokens(std::int64_t n) {
    Tokens fresh;
    for (; n > 0; --n) fresh.push_back(next_token_++);
    return fresh;
  }

  void append(Entry& entry, std::int64_t n) {
    const Tokens fresh = fresh_tokens(n);
    for (std::int64_t layer = 0; layer < n_layers(); ++layer) {
      try {
        append_layer(entry, layer, fresh);
      } catch (const StepExhausted&) {
        require(layer == 0, "a step ran out after its first layer");
        return;
      }
    }
    entry.tokens.insert(entry.tokens.end(), fresh.begin(), fresh.end());
  }

  /// A step that reaches some layers only, then what takes it back.
  void tear(Entry& entry, std::int64_t n, std::uint8_t how) {
    const std::int64_t reached = how % n_layers();
    const Tokens fresh = fresh_tokens(n);
    for (std::int64_t layer = 0; layer < reached; ++layer) {
      try {
        append_layer(entry, layer, fresh);
      } catch (const StepExhausted&) {
        require(layer == 0, "a step ran out after its first layer");
        return;
      }
    }
    switch (how / 16 % 3) {
      case 0:
        entry.sequence.group().roll_back_step();
        break;
      case 1:
        append(entry, 1);
        break;
      default:
        trim(entry, 2);
    }
  }

  void trim(Entry& entry, std::int64_t n) {
    entry.sequence.group().roll_back_step();
    const std::int64_t trimmed = entry.sequence.trim(n);
    require(trimmed >= 0 && trimmed <= n, "trim dropped more than was asked");
    bool closed = false;
    for (const PagedLayerSpec& spec : specs_) {
      closed = closed ||
               (spec.window > 0 && static_cast<std::int64_t>(entry.tokens.size()) >= spec.window);
    }
    const std::int64_t expected =
        closed ? 0 : std::min(n, static_cast<std::int64_t>(entry.tokens.size()));
    require(trimmed == expected, "trim dropped another number of tokens");
    entry.tokens.resize(entry.tokens.size() - static_cast<std::size_t>(trimmed));
  }

  void fork(Entry& entry, std::uint8_t owner) {
    if (entries_.size() == kMaxEntries) return;
    const auto before = pool_->store().stats().used_bytes;
    std::optional<OwnerId> new_owner;
    if (owner % 2 == 0) new_owner = owner / 2 % 3;
    Entry copy{entry.sequence.fork(new_owner), entry.tokens};
    require(pool_->store().stats().used_bytes == before, "a fork took bytes");
    entries_.push_back(std::move(copy));
  }

  /// The last positions' queries against the definition, in double precision.
  void attend(Entry& entry, std::uint8_t which, std::int64_t n_queries) {
    const std::int64_t layer = which % n_layers();
    const auto n = static_cast<std::int64_t>(entry.tokens.size());
    const std::int64_t window = specs_[static_cast<std::size_t>(layer)].window;
    const PagedLayer& held = entry.sequence.layer(layer);
    n_queries = std::min(n_queries, held.length());
    // Queries that see tokens behind what the window keeps are not asked for.
    if (held.first_position() > 0) {
      n_queries = std::min(n_queries, n - window + 1 - held.first_position());
    }
    if (n_queries <= 0) return;
    const Tokens last(entry.tokens.end() - n_queries, entry.tokens.end());
    const auto queries = rows(last, 2, kQHeads, kKeyDim);
    std::vector<float> output(static_cast<std::size_t>(kQHeads * n_queries * kValueDim));
    entry.sequence.attend(layer, kQHeads, n_queries, source(queries, last.size(), kKeyDim),
                          {reinterpret_cast<std::byte*>(output.data()), formats::Format::kFp32,
                           n_queries * kValueDim, kValueDim});
    for (std::int64_t h = 0; h < kQHeads; ++h) {
      for (std::int64_t i = 0; i < n_queries; ++i) {
        const std::int64_t row = h * n_queries + i;
        const std::int64_t position = n - n_queries + i;
        const std::int64_t first =
            window == 0 ? 0 : std::max<std::int64_t>(0, position - window + 1);
        const auto expected = attended(entry.tokens, queries.data() + row * kKeyDim,
                                       h / (kQHeads / kKvHeads), first, position);
        for (std::int64_t d = 0; d < kValueDim; ++d) {
          const double difference = output[static_cast<std::size_t>(row * kValueDim + d)] -
                                    expected[static_cast<std::size_t>(d)];
          require(std::abs(difference) <= (aged_ ? 0.05 : 1e-5), "attention differs");
        }
      }
    }
  }

  static std::array<double, kValueDim> attended(const Tokens& tokens, const float* query,
                                                std::int64_t head, std::int64_t first,
                                                std::int64_t last) {
    std::array<double, kValueDim> sum = {};
    double total = 0;
    for (std::int64_t t = first; t <= last; ++t) {
      const std::uint32_t token = tokens[static_cast<std::size_t>(t)];
      double score = 0;
      for (std::int64_t d = 0; d < kKeyDim; ++d) score += query[d] * number(token, 0, head, d);
      const double weight = std::exp(score / std::sqrt(static_cast<double>(kKeyDim)));
      total += weight;
      for (std::int64_t d = 0; d < kValueDim; ++d) {
        sum[static_cast<std::size_t>(d)] += weight * number(token, 1, head, d);
      }
    }
    for (double& value : sum) value /= total;
    return sum;
  }

  /// A view shows what its sequence held when it was made.
  void check(const Reader& reader) const {
    const PageView& view = *reader.view;
    require(view.offset() == static_cast<std::int64_t>(reader.tokens.size()),
            "a view's offset is another");
    const std::int64_t n = view.length();
    const std::span<const std::uint32_t> kept(reader.tokens.end() - n, reader.tokens.end());
    check_rows(rows(kept, 0, kKvHeads, kKeyDim), kKeyDim, n,
               [&](auto h, float* to) { view.read_keys(h, 0, n, to, kKeyDim); });
    check_rows(rows(kept, 1, kKvHeads, kValueDim), kValueDim, n,
               [&](auto h, float* to) { view.read_values(h, 0, n, to, kValueDim); });
  }

  template <class Read>
  void check_rows(const std::vector<float>& expected, std::int64_t dim, std::int64_t n,
                  Read read) const {
    std::vector<float> shown(static_cast<std::size_t>(n * dim));
    for (std::int64_t h = 0; n > 0 && h < kKvHeads; ++h) {
      read(h, shown.data());
      for (std::size_t i = 0; i < shown.size(); ++i) {
        const float difference =
            shown[i] - expected[static_cast<std::size_t>(h) * shown.size() + i];
        require(std::abs(difference) <= (aged_ ? 0.02f : 0.0f), "a view shows other numbers");
      }
    }
  }

  void check_books() const {
    for (const Entry& entry : entries_) {
      entry.sequence.group().check_invariants();
      require(entry.sequence.length() == static_cast<std::int64_t>(entry.tokens.size()),
              "a sequence has another length");
    }
    pool_->blocks().check_invariants();
    pool_->store().check_invariants();
  }

  std::shared_ptr<PagedPool> pool_;
  bool aged_ = false;
  std::vector<PagedLayerSpec> specs_;
  std::vector<Entry> entries_;
  std::vector<Reader> readers_;
  std::uint32_t next_token_ = 1;
};

}  // namespace kvpool::cache::testing
