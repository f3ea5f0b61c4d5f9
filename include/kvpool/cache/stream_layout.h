#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/cache/stream_format.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/page_ref.h"

namespace kvpool::cache {

/// A StreamFormat worked out for one shape of pages. Level 0 is `recent`, level i is tier i - 1.
/// Immutable.
class StreamLayout {
 public:
  struct Level {
    /// Of the page; with a codec only its shape counts.
    formats::PageLayout layout;
    std::shared_ptr<const PageCodec> codec;
    std::int64_t after_tokens = 0;
    std::int64_t page_bytes = 0;
    /// What a block of this level is tagged with in the pool.
    std::string name;

    /// What a PageRef to such a page says.
    formats::Format ref_format() const noexcept {
      return codec != nullptr ? kCodecPage : layout.format;
    }
  };

  /// Throws InvalidArgument, whose message names `stream` ("keys", "values"), for a shape or format
  /// that no page has, tiers out of order, and tiers that save nothing.
  StreamLayout(const StreamFormat& format, const formats::PageShape& shape, const char* stream);

  const formats::PageShape& shape() const noexcept { return shape_; }
  std::span<const Level> levels() const noexcept { return levels_; }
  const Level& level(std::size_t index) const noexcept { return levels_[index]; }
  /// Some page of the stream may be a codec's.
  bool has_codec() const noexcept { return has_codec_; }
  /// How the pages of the level that has a codec are read, or nothing: there is at most one.
  methods::PageCodecs codecs() const noexcept {
    for (const Level& level : levels_) {
      if (level.codec != nullptr) return level.codec->codecs();
    }
    return {};
  }
  /// The highest level for a full block whose newest token is `age` tokens old (0: the newest).
  std::size_t level_at(std::int64_t age) const noexcept;

  /// Brings the first `n_tokens` of a page to another page of another, or the same, level; to a
  /// codec's level full pages only. Throws std::bad_alloc where a codec takes part.
  void convert(std::size_t from_level, const std::byte* from, std::size_t to_level, std::byte* to,
               std::int64_t n_tokens) const;
  /// Numbers of tokens first .. first + count of a head from a page of any level.
  void decode(std::size_t level, const std::byte* page, std::int64_t head, std::int64_t first,
              std::int64_t count, float* rows, std::int64_t row_stride) const;

 private:
  formats::PageShape shape_;
  std::vector<Level> levels_;
  bool has_codec_ = false;
};

}  // namespace kvpool::cache
