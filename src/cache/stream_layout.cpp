#include "kvpool/cache/stream_layout.h"

#include <cstring>
#include <limits>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/kernels/page_append.h"

namespace kvpool::cache {

namespace {

constexpr std::size_t kMaxLevels = 255;

[[noreturn]] void refuse(const char* stream, const std::string& what) {
  throw InvalidArgument(std::string("[PagedLayer] ") + stream + " " + what);
}

StreamLayout::Level level_of(const char* stream, const formats::PageShape& shape,
                             const AgeTier& tier) {
  StreamLayout::Level level;
  level.codec = tier.codec;
  level.after_tokens = tier.after_tokens;
  level.layout = {tier.format, shape};
  if (tier.codec == nullptr) {
    formats::check_page(std::string("PagedLayer ") + stream, level.layout);
    level.page_bytes = level.layout.page_bytes();
    level.name = formats::traits(tier.format).name;
    return level;
  }
  if (!(tier.codec->shape() == shape)) {
    refuse(stream, "of " + std::to_string(shape.n_heads) + " heads, " +
                       std::to_string(shape.block_size) + " tokens and " +
                       std::to_string(shape.head_dim) + " dims are not those of the codec " +
                       tier.codec->name());
  }
  level.page_bytes = tier.codec->page_bytes();
  level.name = tier.codec->name();
  return level;
}

}  // namespace

StreamLayout::StreamLayout(const StreamFormat& format, const formats::PageShape& shape,
                           const char* stream)
    : shape_(shape) {
  if (format.tiers.size() >= kMaxLevels) refuse(stream, "has too many tiers");
  levels_.push_back(level_of(stream, shape, {0, format.recent, nullptr}));
  levels_.front().after_tokens = 0;
  std::int64_t after = -1;
  for (const AgeTier& tier : format.tiers) {
    if (tier.after_tokens <= after) {
      refuse(stream, "tiers must be of rising after_tokens >= 0, got " +
                         std::to_string(tier.after_tokens) + " after " + std::to_string(after));
    }
    after = tier.after_tokens;
    StreamLayout::Level level = level_of(stream, shape, tier);
    if (level.page_bytes >= levels_.back().page_bytes) {
      refuse(stream, "tier " + level.name + " takes " + std::to_string(level.page_bytes) +
                         " bytes a block and the one before it, " + levels_.back().name + ", " +
                         std::to_string(levels_.back().page_bytes));
    }
    // A PageRef says that a codec encoded its page, but not which.
    if (level.codec != nullptr && std::exchange(has_codec_, true)) {
      refuse(stream, "tiers must have at most one codec, got " + level.name + " after another");
    }
    levels_.push_back(std::move(level));
  }
}

std::size_t StreamLayout::level_at(std::int64_t age) const noexcept {
  std::size_t level = 0;
  while (level + 1 < levels_.size() && levels_[level + 1].after_tokens <= age) ++level;
  return level;
}

void StreamLayout::convert(std::size_t from_level, const std::byte* from, std::size_t to_level,
                           std::byte* to, std::int64_t n_tokens) const {
  const Level& source = levels_[from_level];
  const Level& target = levels_[to_level];
  if (from_level == to_level) {
    if (source.codec != nullptr || source.layout.coded()) {
      std::memcpy(to, from, static_cast<std::size_t>(source.page_bytes));
      return;
    }
    // Nothing else is touched: somebody may be writing the tokens that follow.
    const auto head_bytes = static_cast<std::size_t>(source.layout.head_bytes());
    const std::size_t used = head_bytes / static_cast<std::size_t>(shape_.block_size) *
                             static_cast<std::size_t>(n_tokens);
    for (std::int64_t h = 0; h < shape_.n_heads; ++h) {
      const std::size_t at = static_cast<std::size_t>(h) * head_bytes;
      std::memcpy(to + at, from + at, used);
    }
    return;
  }
  if (target.codec != nullptr) {
    if (source.codec == nullptr) return target.codec->encode(source.layout, from, to);
    std::vector<float> rows(
        static_cast<std::size_t>(shape_.n_heads * shape_.block_size * shape_.head_dim));
    const formats::PageLayout numbers{formats::Format::kFp32, shape_};
    for (std::int64_t h = 0; h < shape_.n_heads; ++h) {
      source.codec->decode(from, h, 0, n_tokens,
                           rows.data() + h * shape_.block_size * shape_.head_dim, shape_.head_dim);
    }
    return target.codec->encode(numbers, reinterpret_cast<const std::byte*>(rows.data()), to);
  }
  if (source.codec == nullptr) {
    kernels::page_kernels().convert_page(source.layout, from, target.layout, to, n_tokens);
    return;
  }
  std::vector<float> rows(static_cast<std::size_t>(shape_.n_heads * n_tokens * shape_.head_dim));
  const std::int64_t head_stride = n_tokens * shape_.head_dim;
  for (std::int64_t h = 0; h < shape_.n_heads; ++h) {
    source.codec->decode(from, h, 0, n_tokens, rows.data() + h * head_stride, shape_.head_dim);
  }
  kernels::page_kernels().append_rows(target.layout, to, 0, n_tokens,
                                      {reinterpret_cast<const std::byte*>(rows.data()),
                                       formats::Format::kFp32, head_stride, shape_.head_dim});
}

void StreamLayout::decode(std::size_t level, const std::byte* page, std::int64_t head,
                          std::int64_t first, std::int64_t count, float* rows,
                          std::int64_t row_stride) const {
  const Level& source = levels_[level];
  if (source.codec != nullptr) {
    source.codec->decode(page, head, first, count, rows, row_stride);
  } else {
    kernels::page_kernels().decode_head(source.layout, page, head, first, count, rows, row_stride);
  }
}

}  // namespace kvpool::cache
