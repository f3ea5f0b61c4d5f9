#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvpool/base/aligned_buffer.h"
#include "kvpool/formats/format.h"

namespace kvpool::cache {

struct ExactKVCacheConfig {
  /// Numbers in a key and in a value, >= 1.
  std::int64_t head_dim = 0;
  /// fp32, fp16 or bf16: how keys and values are kept.
  formats::Format format = formats::Format::kFp16;
  /// Tokens kept, >= 1; from then on each new token overwrites the oldest. Unbounded where empty.
  std::optional<std::int64_t> capacity;

  /// Throws InvalidArgument naming the first field out of range and its value.
  void validate() const;
};

/// The keys and values of one head and one sequence, kept as they come, and exact attention over
/// them: what the quantised caches are measured against.
///
/// A token is a key and then its value; a key whose value has not come yet takes no part in
/// anything. Misuse throws InvalidArgument and changes nothing: rows that are not head_dim long, a
/// number that is NaN, infinite or beyond the format's range, a value without a key, a second key.
///
/// Not synchronised; attend() may run in several threads at once.
class ExactKVCache {
 public:
  explicit ExactKVCache(const ExactKVCacheConfig& config);

  const ExactKVCacheConfig& config() const noexcept { return config_; }
  /// Tokens kept.
  std::int64_t size() const noexcept { return n_tokens_; }
  /// A key is waiting for its value.
  bool has_pending_key() const noexcept { return has_pending_key_; }

  /// [head_dim]
  void append_key(std::span<const float> key);
  /// [head_dim]
  void append_value(std::span<const float> value);
  /// Both or neither.
  void append(std::span<const float> key, std::span<const float> value);
  /// Forgets the waiting key, if any.
  void discard_key() noexcept { has_pending_key_ = false; }

  /// softmax(q . K / sqrt(head_dim)) V for each query, computed in fp32 from the kept numbers;
  /// zeros where nothing is kept. `queries` and `output` are [n, head_dim].
  void attend(std::span<const float> queries, std::span<float> output) const;

  /// Bytes allocated for keys and values. They grow by doubling and are kept by reset().
  std::size_t memory_bytes() const noexcept {
    return keys_.size() + values_.size() + pending_key_.size();
  }
  /// Forgets every token.
  void reset() noexcept;

  /// Throws Error naming the first thing that does not add up.
  void check_invariants() const;

 private:
  void check_row(const char* call, const char* name, std::span<const float> row) const;
  /// Makes room for one token and returns the row that it goes to.
  std::size_t next_row();
  void store(AlignedBuffer& rows, std::size_t row, std::span<const float> numbers) noexcept;
  void count_token() noexcept;

  ExactKVCacheConfig config_;
  std::size_t row_bytes_;
  std::int64_t n_tokens_ = 0;
  /// Rows that keys_ and values_ have room for.
  std::int64_t n_rows_ = 0;
  /// The oldest token's row once the ring is full.
  std::int64_t oldest_ = 0;
  bool has_pending_key_ = false;
  // [n_rows_, head_dim] in config_.format each; [head_dim] for the waiting key.
  AlignedBuffer keys_;
  AlignedBuffer values_;
  AlignedBuffer pending_key_;
};

}  // namespace kvpool::cache
