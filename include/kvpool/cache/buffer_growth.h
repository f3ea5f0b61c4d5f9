#pragma once

#include <cstdint>
#include <variant>

namespace kvpool::cache {

/// The token rows of one layer's pair of buffers (keys and values move together).
struct BufferShape {
  /// Tokens appended and not trimmed, those that a ring has overwritten included.
  std::int64_t offset = 0;
  /// Rows of each buffer, filled or not.
  std::int64_t rows = 0;
  /// Row that the next token goes to; in a linear buffer the offset.
  std::int64_t index = 0;

  /// Rows that hold a token.
  std::int64_t used() const noexcept { return offset < rows ? offset : rows; }

  friend bool operator==(const BufferShape&, const BufferShape&) = default;
};

/// How a buffer gets room for more tokens: the arithmetic alone, so that a group can ask what a
/// step will take before any layer moves.
class BufferGrowth {
 public:
  /// Whole steps and nothing else, as mlx-lm's KVCache: an old buffer whose offset is not a
  /// multiple of `step` is cut to the offset, then ceil(n / step) * step rows are added.
  static BufferGrowth exact(std::int64_t step);
  /// By half again, rounded up to `quantum` rows, so that copies stay few; less where the pool is
  /// short, down to whole blocks (see `halvings` of after()).
  static BufferGrowth spare(std::int64_t quantum, std::int64_t block_size);
  /// A window of `max_size` tokens whose first `keep` stay, as mlx-lm's RotatingKVCache: single
  /// tokens overwrite the oldest, a chunk of S leaves max_size - 1 + S rows.
  /// Until the window is full it grows by `step` rows: exactly, or, where `block_size` is given, by
  /// fewer where the pool is short, down to whole blocks.
  static BufferGrowth ring(std::int64_t max_size, std::int64_t keep, std::int64_t step,
                           std::int64_t block_size = 0);

  /// The same, but a spare growth comes up to `lead` tokens before it has to, where the pool has
  /// room for all of it. Layers with different leads do not all copy in one step.
  BufferGrowth leading(std::int64_t lead) const;
  std::int64_t lead() const noexcept;
  bool has_spare() const noexcept { return std::holds_alternative<Spare>(kind_); }

  /// No spare rows at all.
  static constexpr int kNoSpare = 62;

  /// The shape after `n_tokens` (>= 1) more. What a spare growth adds beyond the need is halved
  /// `halvings` times.
  BufferShape after(const BufferShape& now, std::int64_t n_tokens, int halvings) const;
  /// The shape after dropping the newest `n_tokens` of a buffer that has not wrapped; rows of whole
  /// blocks beyond the new offset go where a block was left empty.
  BufferShape trimmed(const BufferShape& now, std::int64_t n_tokens, std::int64_t block_size) const;
  /// The shape that takes back the step from `before` to `after`, of which the buffer, now
  /// `rows_in_buffer` long, shows the result if `written`. No token that a later step could see is
  /// missing: a ring's overwritten row was out of the window of the next token.
  BufferShape undone(const BufferShape& before, const BufferShape& after,
                     std::int64_t rows_in_buffer, bool written) const;
  /// Without spare rows, which exact growth has none of: whole blocks of tokens.
  BufferShape tightened(const BufferShape& now) const noexcept;
  /// False once a ring has overwritten tokens.
  bool is_trimmable(const BufferShape& now) const noexcept;

 private:
  struct Exact {
    std::int64_t step;
  };
  struct Spare {
    std::int64_t quantum;
    std::int64_t block_size;
    std::int64_t lead = 0;
  };
  struct Ring {
    std::int64_t max_size;
    std::int64_t keep;
    std::int64_t step;
    std::int64_t block_size;
  };
  using Kind = std::variant<Exact, Spare, Ring>;

  static BufferShape grown(const Exact& kind, const BufferShape& now, std::int64_t n_tokens,
                           int halvings);
  static BufferShape grown(const Spare& kind, const BufferShape& now, std::int64_t n_tokens,
                           int halvings);
  static BufferShape grown(const Ring& kind, const BufferShape& now, std::int64_t n_tokens,
                           int halvings);

  explicit BufferGrowth(Kind kind) : kind_(kind) {}

  Kind kind_;
};

}  // namespace kvpool::cache
