#include "kvpool/cache/exact_kv_cache.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/formats/rows.h"
#include "kvpool/kernels/attention.h"

namespace kvpool::cache {
namespace {

using formats::Format;

constexpr std::int64_t kFirstRows = 16;

// The smallest magnitude that rounds to infinity.
float overflow_bound(Format format) noexcept {
  switch (format) {
    case Format::kFp16:
      return 65520.0f;
    case Format::kBf16:
      return std::bit_cast<float>(0x7f7f8000u);
    default:
      return std::numeric_limits<float>::infinity();
  }
}

[[noreturn]] void refuse(const char* call, const std::string& why) {
  throw InvalidArgument(std::string("[ExactKVCache::") + call + "] " + why);
}

}  // namespace

void ExactKVCacheConfig::validate() const {
  const auto require = [](bool holds, const std::string& why) {
    if (!holds) throw InvalidArgument("[ExactKVCache] " + why);
  };
  // So that no number of rows overflows a size.
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  require(head_dim >= 1 && head_dim <= kMost,
          "head_dim must be in 1.." + std::to_string(kMost) + ", got " + std::to_string(head_dim));
  require(
      formats::traits(format).kind == formats::Kind::kFloat,
      "format must be fp32, fp16 or bf16, got '" + std::string(formats::traits(format).name) + "'");
  require(!capacity || *capacity >= 1,
          "capacity must be >= 1, got " + std::to_string(capacity.value_or(0)));
}

ExactKVCache::ExactKVCache(const ExactKVCacheConfig& config) : config_(config), row_bytes_(0) {
  config_.validate();
  row_bytes_ = formats::row_bytes(config_.format, static_cast<std::size_t>(config_.head_dim));
}

void ExactKVCache::check_row(const char* call, const char* name, std::span<const float> row) const {
  if (row.size() != static_cast<std::size_t>(config_.head_dim)) {
    refuse(call, std::string(name) + " must have " + std::to_string(config_.head_dim) +
                     " numbers, got " + std::to_string(row.size()));
  }
  const float bound = overflow_bound(config_.format);
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (std::abs(row[i]) < bound) continue;  // false for NaN
    refuse(call, std::string(name) + " must be finite in " +
                     std::string(formats::traits(config_.format).name) + ", got " +
                     std::to_string(row[i]) + " at " + std::to_string(i));
  }
}

std::size_t ExactKVCache::next_row() {
  const std::int64_t capacity = config_.capacity.value_or(std::numeric_limits<std::int64_t>::max());
  if (n_tokens_ == capacity) return static_cast<std::size_t>(oldest_);
  if (n_tokens_ == n_rows_) {
    const std::int64_t rows = std::min(capacity, std::max(kFirstRows, 2 * n_rows_));
    const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes_;
    AlignedBuffer keys(bytes);
    AlignedBuffer values(bytes);
    if (n_tokens_ > 0) {
      const std::size_t held = static_cast<std::size_t>(n_tokens_) * row_bytes_;
      std::memcpy(keys.data(), keys_.data(), held);
      std::memcpy(values.data(), values_.data(), held);
    }
    keys_ = std::move(keys);
    values_ = std::move(values);
    n_rows_ = rows;
  }
  return static_cast<std::size_t>(n_tokens_);
}

void ExactKVCache::store(AlignedBuffer& rows, std::size_t row,
                         std::span<const float> numbers) noexcept {
  // Float formats take every number, and check_row has seen these.
  (void)formats::encode_row(config_.format, numbers,
                            rows.bytes().subspan(row * row_bytes_, row_bytes_));
}

void ExactKVCache::count_token() noexcept {
  if (config_.capacity && n_tokens_ == *config_.capacity) {
    oldest_ = (oldest_ + 1) % *config_.capacity;
  } else {
    ++n_tokens_;
  }
}

void ExactKVCache::append_key(std::span<const float> key) {
  check_row("append_key", "key", key);
  if (has_pending_key_) refuse("append_key", "the last key still waits for its value");
  if (pending_key_.empty()) pending_key_ = AlignedBuffer(row_bytes_);
  store(pending_key_, 0, key);
  has_pending_key_ = true;
}

void ExactKVCache::append_value(std::span<const float> value) {
  check_row("append_value", "value", value);
  if (!has_pending_key_) refuse("append_value", "a value must follow its key");
  const std::size_t row = next_row();
  std::memcpy(keys_.data() + row * row_bytes_, pending_key_.data(), row_bytes_);
  store(values_, row, value);
  count_token();
  has_pending_key_ = false;
}

void ExactKVCache::append(std::span<const float> key, std::span<const float> value) {
  check_row("append", "key", key);
  check_row("append", "value", value);
  if (has_pending_key_) refuse("append", "the last key still waits for its value");
  const std::size_t row = next_row();
  store(keys_, row, key);
  store(values_, row, value);
  count_token();
}

void ExactKVCache::attend(std::span<const float> queries, std::span<float> output) const {
  const auto head_dim = static_cast<std::size_t>(config_.head_dim);
  if (queries.size() % head_dim != 0 || output.size() != queries.size()) {
    refuse("attend", "queries and output must be rows of " + std::to_string(head_dim) +
                         " numbers, got " + std::to_string(queries.size()) + " and " +
                         std::to_string(output.size()) + " numbers");
  }
  if (n_tokens_ == 0) {
    std::ranges::fill(output, 0.0f);
    return;
  }
  // The rows are taken as they lie: a softmax does not care about their order.
  kernels::attention({.queries = queries.data(),
                      .keys = keys_.data(),
                      .values = values_.data(),
                      .format = config_.format,
                      .n_queries = static_cast<std::int64_t>(queries.size() / head_dim),
                      .n_tokens = n_tokens_,
                      .head_dim = config_.head_dim,
                      .value_dim = config_.head_dim,
                      .scale = kernels::attention_scale(config_.head_dim),
                      .output = output.data()});
}

void ExactKVCache::reset() noexcept {
  n_tokens_ = 0;
  oldest_ = 0;
  has_pending_key_ = false;
}

void ExactKVCache::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("[ExactKVCache::check_invariants] ") + what);
  };
  require(n_tokens_ >= 0 && n_tokens_ <= n_rows_, "more tokens than rows");
  require(!config_.capacity || n_rows_ <= *config_.capacity, "more rows than capacity");
  require(oldest_ == 0 || n_tokens_ == config_.capacity, "a ring that is not full has turned");
  const std::size_t bytes = static_cast<std::size_t>(n_rows_) * row_bytes_;
  require(keys_.size() == bytes && values_.size() == bytes, "buffers do not match the rows");
  require(pending_key_.size() == row_bytes_ || (pending_key_.empty() && !has_pending_key_),
          "the waiting key has no row");
}

}  // namespace kvpool::cache
