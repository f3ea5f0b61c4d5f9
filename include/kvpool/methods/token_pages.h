#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "kvpool/base/aligned_buffer.h"
#include "kvpool/methods/attention_run.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// Consecutive tokens of some heads in pages of a fixed number of tokens, appended at the end and
/// dropped from the front a page at a time. Tokens are named by their position in the sequence.
class TokenPages {
 public:
  /// `codecs`: those of each head, of equal page sizes. They outlive the pages, and page_tokens is
  /// a multiple of their groups. Pages start at multiples of page_tokens.
  TokenPages(std::vector<CodecPair> codecs, std::int64_t page_tokens);

  CodecPair codecs(std::int64_t head) const noexcept {
    return codecs_[static_cast<std::size_t>(head)];
  }
  std::int64_t n_heads() const noexcept { return static_cast<std::int64_t>(codecs_.size()); }
  std::int64_t page_tokens() const noexcept { return page_tokens_; }
  /// The first position whose page is held, and one past the last token written.
  std::int64_t begin() const noexcept { return begin_; }
  std::int64_t end() const noexcept { return end_; }
  std::int64_t memory_bytes() const noexcept {
    return static_cast<std::int64_t>(pages_.size()) * page_bytes();
  }

  /// Allocates what positions up to `end` need. Throws std::bad_alloc with part of it allocated.
  void reserve(std::int64_t end);

  /// Encodes tokens end()..end() + n_tokens of one head; they are counted by advance(), once for
  /// all heads. Reserved before. Vectors [n_tokens, head_dim], rows `stride` apart.
  void encode(std::int64_t head, const float* keys, const float* values, std::int64_t stride,
              std::int64_t n_tokens, float* scratch) noexcept;
  void advance(std::int64_t n_tokens) noexcept { end_ += n_tokens; }
  /// Takes the last n_tokens back.
  void rewind(std::int64_t n_tokens) noexcept { end_ -= n_tokens; }

  /// Drops whole pages before `position`.
  void drop_before(std::int64_t position) noexcept;
  /// Gives back what reserve() took and no token came to use.
  void drop_unused() noexcept;

  /// use(keys, values, range, position) for each page's part of positions [first, end()).
  template <class Use>
  void for_each_page(std::int64_t head, std::int64_t first, Use use) const {
    for (std::int64_t position = std::max(first, begin_); position < end_;) {
      const std::int64_t page = (position - begin_) / page_tokens_;
      const std::int64_t start = begin_ + page * page_tokens_;
      const std::int64_t stop = std::min(end_, start + page_tokens_);
      const std::byte* data = pages_[static_cast<std::size_t>(page)].data() + head * head_bytes();
      use(ConstPage{data, page_tokens_}, ConstPage{data + key_bytes_, page_tokens_},
          TokenRange{position - start, stop - position}, position);
      position = stop;
    }
  }

  /// Throws std::logic_error where the pages do not cover exactly what they hold.
  void check_invariants() const;

 private:
  std::int64_t head_bytes() const noexcept { return key_bytes_ + value_bytes_; }
  std::int64_t page_bytes() const noexcept { return n_heads() * head_bytes(); }

  std::vector<CodecPair> codecs_;
  std::int64_t page_tokens_;
  /// Of a page of one head, rounded up to even.
  std::int64_t key_bytes_;
  std::int64_t value_bytes_;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  /// Each [n_heads, key page then value page].
  std::deque<AlignedBuffer> pages_;
};

}  // namespace kvpool::methods
