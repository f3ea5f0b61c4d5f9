#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/methods/method.h"
#include "kvpool/methods/token_pages.h"

namespace kvpool::methods {

/// The keys and values of a layer, quantised: grows on demand, holds some sequences of equal length
/// with some heads each, and answers attention over them.
///
/// Tokens are named by their position, 0 for the first since the last reset. They live in one of
/// two places: *exact* ones, the newest, as they came (only where the method has a residual length
/// or codes tokens in groups), and *coded* ones. Exact tokens become coded a unit at a time, as
/// soon as residual_length newer ones are there; units start at multiples of their size, so what is
/// stored does not depend on how appends were cut.
///
/// Attends may run at the same time; a change needs the cache to itself.
class QuantizedKVCache {
 public:
  struct Shape {
    std::int64_t batch = 1;
    std::int64_t n_kv_heads = 1;

    friend bool operator==(const Shape&, const Shape&) = default;
  };

  /// Throws InvalidArgument for a bad config.
  explicit QuantizedKVCache(const KVCacheConfig& config);
  /// Many caches may share a method. It is not null.
  explicit QuantizedKVCache(std::shared_ptr<const Method> method);

  const Method& method() const noexcept { return *method_; }
  std::int64_t head_dim() const noexcept { return method_->config.head_dim; }
  /// That of the first append since the last reset.
  Shape shape() const noexcept { return shape_; }
  /// Tokens of each sequence that are held.
  std::int64_t size() const noexcept { return end_ - begin_; }
  /// Positions [begin, end) are held.
  std::int64_t begin() const noexcept { return begin_; }
  std::int64_t end() const noexcept { return end_; }
  /// Those of [begin, end) that are exact.
  std::int64_t n_exact() const noexcept;
  /// A key waits for its value.
  bool has_pending_key() const noexcept { return !pending_key_.empty(); }
  /// Bytes of all pages and of a waiting key: what the tokens take. method()'s rotations and
  /// codebooks, shared by every cache of the method, are not among them.
  std::int64_t memory_bytes() const noexcept;

  /// Appends n_tokens to every sequence: `keys` and `values` are [batch, n_kv_heads, n_tokens,
  /// head_dim] floats. Throws InvalidArgument, and changes nothing, where the shape is not that of
  /// the tokens held, a number is NaN, infinite or above kLargestInput (or what `precision` holds),
  /// or a key waits for its value.
  void append(const float* keys, const float* values, Shape shape, std::int64_t n_tokens);

  /// The same for one token of one sequence and head, in two calls: [head_dim] each. A second key
  /// before its value, or a value before its key, is an InvalidArgument that changes nothing.
  /// A key whose value has not come takes no part in anything.
  void append_key(const float* key);
  void append_value(const float* value);
  /// Forgets the waiting key, if any.
  void discard_key() noexcept { std::vector<float>().swap(pending_key_); }

  struct Queries {
    /// [batch, n_heads, n_queries, head_dim]; n_heads is a multiple of n_kv_heads, and heads that
    /// share keys and values lie next to each other.
    const float* data = nullptr;
    std::int64_t batch = 1;
    std::int64_t n_heads = 1;
    std::int64_t n_queries = 1;
    /// Query i sees positions up to causal_offset + i; every token where empty.
    std::optional<std::int64_t> causal_offset;
    /// Of the scores; 1 / sqrt(head_dim) where empty.
    std::optional<float> scale;
    /// The fastest kernels of the machine where null.
    const kernels::RowKernels* kernels = nullptr;
  };

  /// `output` is shaped as the queries. A query that sees no token gets zeros. Throws
  /// InvalidArgument for a wrong shape.
  void attend(const Queries& queries, float* output) const;

  /// Empties the cache and gives its pages back. The next append may have another shape.
  void reset() noexcept;

  /// Throws std::logic_error where the books do not add up.
  void check_invariants() const;

 private:
  void check_numbers(const char* call, const char* what, const float* numbers,
                     std::int64_t n) const;
  void prepare(Shape shape);
  void store(const float* keys, const float* values, std::int64_t n_tokens);
  /// Where exact tokens start once `end` tokens were appended.
  std::int64_t coded_end(std::int64_t end) const noexcept;
  std::unique_ptr<TokenPages> make_pages(std::vector<CodecPair> codecs) const;
  /// Key codecs of each head, and empty pages for them.
  struct Channels {
    std::vector<std::unique_ptr<const StreamCodec>> codecs;
    std::unique_ptr<TokenPages> pages;
  };
  /// Chooses each head's outlier channels from the first exact tokens.
  Channels choose_channels() const;
  void encode_exact_until(std::int64_t position) noexcept;
  void evict() noexcept;

  std::shared_ptr<const Method> method_;
  /// Coding of exact tokens; null where every token is coded at once.
  std::unique_ptr<const StreamCodec> exact_codec_;
  std::int64_t unit_ = 1;
  Shape shape_;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  /// Key codecs of each head, where outlier channels were chosen.
  std::vector<std::unique_ptr<const StreamCodec>> outlier_codecs_;
  /// Made by the first append.
  std::unique_ptr<TokenPages> coded_;
  std::unique_ptr<TokenPages> exact_;
  std::vector<float> pending_key_;
  /// [2, unit, padded head_dim]: exact tokens on their way to codes.
  std::vector<float> moving_;
  std::vector<float> scratch_;
};

}  // namespace kvpool::methods
