#include "kvpool/methods/quantized_kv_cache.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/methods/exact_rows.h"
#include "kvpool/methods/magnitude.h"
#include "kvpool/methods/outlier_channels.h"
#include "kvpool/methods/registry.h"

namespace kvpool::methods {
namespace {

// Large enough that the work of starting a page does not show, small enough that the unused part of
// the last one is a few kilobytes.
constexpr std::int64_t kPageTokens = 64;
constexpr std::int64_t kExactUnit = 32;

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

[[noreturn]] void refuse(const char* call, const std::string& what) {
  throw InvalidArgument("[QuantizedKVCache::" + std::string(call) + "] " + what);
}

/// make_method() has filled it in.
std::int64_t residual_length_of(const KVCacheConfig& config) {
  return config.residual_length.value_or(0);
}

float largest_of(formats::Format precision) {
  constexpr float kLargestHalf = 65504;
  return precision == formats::Format::kFp16 ? kLargestHalf : kLargestInput;
}

/// Adds the tokens of a head from position `first` on, which lie in code space `space`.
void attend_pages(AttentionRun& run, std::int64_t space, const TokenPages& pages, std::int64_t head,
                  std::int64_t first) noexcept {
  const CodecPair codecs = pages.codecs(head);
  const kernels::RowKernels& kernels = run.kernels();
  pages.for_each_page(
      head, first, [&](ConstPage keys, ConstPage values, TokenRange range, std::int64_t position) {
        for (std::int64_t done = 0; done < range.count; done += AttentionRun::kTile) {
          const std::int64_t at = range.first + done;
          const auto decode_with = [&](const StreamCodec& codec, ConstPage page) {
            return [&codec, &kernels, page, at](TokenRange part, kernels::FloatRows out,
                                                float* scratch) {
              codec.decode(page, {at + part.first, part.count}, kernels, out, scratch);
            };
          };
          run.add(space, space, position + done, std::min(AttentionRun::kTile, range.count - done),
                  decode_with(*codecs.keys, keys), decode_with(*codecs.values, values),
                  AttentionRun::NoBias{});
        }
      });
}

}  // namespace

QuantizedKVCache::QuantizedKVCache(const KVCacheConfig& config)
    : QuantizedKVCache(make_method(config)) {}

QuantizedKVCache::QuantizedKVCache(std::shared_ptr<const Method> method)
    : method_(std::move(method)) {
  const std::int64_t group = std::max(method_->keys->group(), method_->values->group());
  std::int64_t rows = 1;
  const KVCacheConfig& config = method_->config;
  if (group > 1 || residual_length_of(config) > 0 || config.n_outlier_channels > 0) {
    exact_codec_ = std::make_unique<ExactRows>(head_dim(), method_->config.precision);
    unit_ = group > 1 ? group : kExactUnit;
    rows = unit_;
    moving_.resize(size_of(2 * unit_ * kernels::padded_row(head_dim())));
  }
  // OutlierChannels takes a vector more.
  scratch_.resize(size_of(head_dim() + std::max(method_->keys->scratch_floats(rows),
                                                method_->values->scratch_floats(rows))));
}

std::int64_t QuantizedKVCache::n_exact() const noexcept {
  return exact_ ? end_ - std::max(begin_, coded_->end()) : 0;
}

std::int64_t QuantizedKVCache::memory_bytes() const noexcept {
  return (coded_ ? coded_->memory_bytes() : 0) + (exact_ ? exact_->memory_bytes() : 0) +
         static_cast<std::int64_t>(pending_key_.size() * sizeof(float));
}

void QuantizedKVCache::check_numbers(const char* call, const char* what, const float* numbers,
                                     std::int64_t n) const {
  const float largest = exact_codec_ ? largest_of(method_->config.precision) : kLargestInput;
  // NaN compares false with everything.
  const auto fits = [largest](float number) { return std::abs(number) <= largest; };
  bool all = true;
  for (std::int64_t i = 0; i < n; ++i) all &= fits(numbers[i]);
  if (all) return;
  const float* bad = std::find_if_not(numbers, numbers + n, fits);
  const std::string number = std::to_string(*bad);
  if (!std::isfinite(*bad)) refuse(call, std::string(what) + " must be finite, got " + number);
  refuse(call,
         std::string(what) + " must be within +-" + std::to_string(largest) + " for precision " +
             std::string(formats::traits(method_->config.precision).name) + ", got " + number);
}

void QuantizedKVCache::prepare(Shape shape) {
  if (coded_ && shape_ == shape) return;
  const std::size_t n_heads = size_of(shape.batch * shape.n_kv_heads);
  auto coded = make_pages({n_heads, CodecPair{method_->keys.get(), method_->values.get()}});
  if (exact_codec_) {
    exact_ = std::make_unique<TokenPages>(
        std::vector(n_heads, CodecPair{exact_codec_.get(), exact_codec_.get()}), unit_);
  }
  coded_ = std::move(coded);
  shape_ = shape;
}

std::unique_ptr<TokenPages> QuantizedKVCache::make_pages(std::vector<CodecPair> codecs) const {
  const std::int64_t page_tokens = (kPageTokens + unit_ - 1) / unit_ * unit_;
  return std::make_unique<TokenPages>(std::move(codecs), page_tokens);
}

void QuantizedKVCache::append(const float* keys, const float* values, Shape shape,
                              std::int64_t n_tokens) {
  if (shape.batch < 1 || shape.n_kv_heads < 1 || n_tokens < 0) {
    refuse("append", "needs batch and n_kv_heads >= 1 and n_tokens >= 0, got " +
                         std::to_string(shape.batch) + ", " + std::to_string(shape.n_kv_heads) +
                         " and " + std::to_string(n_tokens));
  }
  if (has_pending_key()) refuse("append", "the key that was appended last waits for its value");
  if (end_ > 0 && shape != shape_) {
    refuse("append", "holds batch " + std::to_string(shape_.batch) + ", n_kv_heads " +
                         std::to_string(shape_.n_kv_heads) + ", got " +
                         std::to_string(shape.batch) + ", " + std::to_string(shape.n_kv_heads));
  }
  const std::int64_t n = shape.batch * shape.n_kv_heads * n_tokens * head_dim();
  check_numbers("append", "keys", keys, n);
  check_numbers("append", "values", values, n);
  if (n_tokens == 0) return;
  prepare(shape);
  store(keys, values, n_tokens);
}

void QuantizedKVCache::append_key(const float* key) {
  if (has_pending_key()) refuse("append_key", "the key before waits for its value");
  if (end_ > 0 && shape_ != Shape{}) {
    refuse("append_key", "needs a cache of one sequence and head, holds batch " +
                             std::to_string(shape_.batch) + ", n_kv_heads " +
                             std::to_string(shape_.n_kv_heads));
  }
  check_numbers("append_key", "key", key, head_dim());
  pending_key_.assign(key, key + head_dim());
}

void QuantizedKVCache::append_value(const float* value) {
  if (!has_pending_key()) refuse("append_value", "no key waits for a value");
  check_numbers("append_value", "value", value, head_dim());
  prepare(Shape{});
  store(pending_key_.data(), value, 1);
  discard_key();
}

std::int64_t QuantizedKVCache::coded_end(std::int64_t end) const noexcept {
  if (!exact_codec_) return end;
  const KVCacheConfig& config = method_->config;
  if (config.n_outlier_channels > 0 && end < config.n_calib_tokens) return 0;
  const std::int64_t residual = std::min(residual_length_of(config), config.capacity.value_or(end));
  return std::max<std::int64_t>(0, end - residual) / unit_ * unit_;
}

void QuantizedKVCache::store(const float* keys, const float* values, std::int64_t n_tokens) {
  const KVCacheConfig& config = method_->config;
  const std::int64_t new_end = end_ + n_tokens;
  TokenPages& pages = exact_codec_ ? *exact_ : *coded_;
  Channels chosen;
  bool stored = false;
  try {
    pages.reserve(new_end);
    for (std::int64_t head = 0; head < pages.n_heads(); ++head) {
      const std::int64_t first = head * n_tokens * head_dim();
      pages.encode(head, keys + first, values + first, head_dim(), n_tokens, scratch_.data());
    }
    pages.advance(n_tokens);
    stored = true;
    if (config.n_outlier_channels > 0 && outlier_codecs_.empty() &&
        new_end >= config.n_calib_tokens) {
      chosen = choose_channels();
    }
    (chosen.pages ? *chosen.pages : *coded_).reserve(coded_end(new_end));
  } catch (...) {
    if (stored) pages.rewind(n_tokens);
    pages.drop_unused();
    coded_->drop_unused();
    throw;
  }
  // From here on nothing fails.
  if (chosen.pages) {
    coded_ = std::move(chosen.pages);
    outlier_codecs_ = std::move(chosen.codecs);
  }
  end_ = new_end;
  if (exact_codec_) encode_exact_until(coded_end(end_));
  evict();
}

QuantizedKVCache::Channels QuantizedKVCache::choose_channels() const {
  const KVCacheConfig& config = method_->config;
  const std::int64_t stride = kernels::padded_row(head_dim());
  std::vector<float> keys_of_page(size_of(unit_ * stride));
  Channels chosen;
  std::vector<CodecPair> pairs;
  for (std::int64_t head = 0; head < exact_->n_heads(); ++head) {
    std::vector<double> sums(size_of(head_dim()));
    exact_->for_each_page(
        head, 0, [&](ConstPage keys, ConstPage, TokenRange range, std::int64_t position) {
          range.count = std::min(range.count, config.n_calib_tokens - position);
          if (range.count <= 0) return;
          exact_codec_->decode(keys, range, kernels::row_kernels(), {keys_of_page.data(), stride},
                               nullptr);
          for (std::int64_t t = 0; t < range.count; ++t) {
            for (std::int64_t i = 0; i < head_dim(); ++i) {
              sums[size_of(i)] +=
                  std::abs(static_cast<double>(keys_of_page[size_of(t * stride + i)]));
            }
          }
        });
    chosen.codecs.push_back(std::make_unique<OutlierChannels>(
        *method_->keys, OutlierChannels::largest(sums, config.n_outlier_channels)));
    pairs.push_back({chosen.codecs.back().get(), method_->values.get()});
  }
  chosen.pages = make_pages(std::move(pairs));
  return chosen;
}

void QuantizedKVCache::encode_exact_until(std::int64_t position) noexcept {
  const std::int64_t stride = kernels::padded_row(head_dim());
  float* keys = moving_.data();
  float* values = keys + unit_ * stride;
  const kernels::RowKernels& kernels = kernels::row_kernels();
  while (coded_->end() < position) {
    for (std::int64_t head = 0; head < exact_->n_heads(); ++head) {
      // An exact page is a unit.
      bool moved = false;
      exact_->for_each_page(
          head, coded_->end(),
          [&](ConstPage key_page, ConstPage value_page, TokenRange range, std::int64_t) {
            if (std::exchange(moved, true)) return;
            exact_codec_->decode(key_page, range, kernels, {keys, stride}, nullptr);
            exact_codec_->decode(value_page, range, kernels, {values, stride}, nullptr);
          });
      coded_->encode(head, keys, values, stride, unit_, scratch_.data());
    }
    coded_->advance(unit_);
  }
  exact_->drop_before(position);
}

void QuantizedKVCache::evict() noexcept {
  const std::optional<std::int64_t> capacity = method_->config.capacity;
  if (!capacity) return;
  begin_ = std::max(begin_, end_ - *capacity);
  coded_->drop_before(begin_);
  // Exact pages stay: the unit that is coded next must be whole, whoever of it was evicted.
}

void QuantizedKVCache::attend(const Queries& queries, float* output) const {
  const std::int64_t dims = head_dim();
  if (queries.batch < 1 || queries.n_heads < 1 || queries.n_queries < 1) {
    refuse("attend", "needs batch, n_heads and n_queries >= 1, got " +
                         std::to_string(queries.batch) + ", " + std::to_string(queries.n_heads) +
                         " and " + std::to_string(queries.n_queries));
  }
  std::fill_n(output, queries.batch * queries.n_heads * queries.n_queries * dims, 0.0f);
  if (end_ == 0) return;
  if (queries.batch != shape_.batch || queries.n_heads % shape_.n_kv_heads != 0) {
    refuse("attend", "holds batch " + std::to_string(shape_.batch) + ", n_kv_heads " +
                         std::to_string(shape_.n_kv_heads) + ", got queries of batch " +
                         std::to_string(queries.batch) + ", n_heads " +
                         std::to_string(queries.n_heads));
  }

  const kernels::RowKernels& kernels = queries.kernels ? *queries.kernels : kernels::row_kernels();
  const float scale = queries.scale.value_or(1 / std::sqrt(static_cast<float>(dims)));
  // Query heads that share a head of keys and values are one run of rows.
  const std::int64_t n_rows = queries.n_heads / shape_.n_kv_heads * queries.n_queries;
  std::vector<float> memory;
  for (std::int64_t head = 0; head < shape_.batch * shape_.n_kv_heads; ++head) {
    CodeSpaces spaces;
    std::array<const TokenPages*, CodeSpaces::kMost> pages_of{};
    for (const TokenPages* pages : {coded_.get(), exact_.get()}) {
      if (pages == nullptr || pages->end() <= begin_) continue;
      pages_of[size_of(spaces.n)] = pages;
      spaces.spaces[size_of(spaces.n++)] = pages->codecs(head);
    }
    for (std::int64_t done = 0; done < n_rows; done += AttentionRun::kMaxRows) {
      const std::int64_t n = std::min(AttentionRun::kMaxRows, n_rows - done);
      const std::int64_t query_floats = AttentionRun::query_floats(spaces, n);
      const std::int64_t sum_floats = AttentionRun::sum_floats(spaces, n);
      memory.resize(size_of(query_floats + sum_floats + AttentionRun::work_floats(spaces, n)));
      float* const start = memory.data();
      AttentionRun run(spaces, n, kernels,
                       {start, start + query_floats, start + query_floats + sum_floats});
      for (std::int64_t row = 0; row < n; ++row) {
        const std::int64_t at = done + row;
        run.enter(row, queries.data + (head * n_rows + at) * dims, scale);
        run.see(row, begin_,
                queries.causal_offset ? *queries.causal_offset + at % queries.n_queries + 1 : end_);
      }
      run.clear();
      for (std::int64_t s = 0; s < spaces.n; ++s) {
        const TokenPages& pages = *pages_of[size_of(s)];
        attend_pages(run, s, pages, head, &pages == coded_.get() ? begin_ : coded_->end());
      }
      for (std::int64_t row = 0; row < n; ++row) {
        run.finish(row, output + (head * n_rows + done + row) * dims);
      }
    }
  }
}

void QuantizedKVCache::reset() noexcept {
  coded_.reset();
  exact_.reset();
  outlier_codecs_.clear();
  discard_key();
  shape_ = {};
  begin_ = end_ = 0;
}

void QuantizedKVCache::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("[QuantizedKVCache::check_invariants] ") + what);
  };
  require(begin_ >= 0 && begin_ <= end_, "begin is past end");
  require(coded_ != nullptr || end_ == 0, "tokens without pages");
  const auto capacity = method_->config.capacity;
  require(!capacity || size() <= *capacity, "more tokens than the capacity");
  if (!coded_) return;
  coded_->check_invariants();
  require(coded_->end() == coded_end(end_), "coded tokens end at the wrong place");
  require(coded_->begin() <= begin_, "lost coded tokens");
  if (!exact_) return;
  exact_->check_invariants();
  require(exact_->begin() == coded_->end() && exact_->end() == end_,
          "exact tokens are not the rest");
}

}  // namespace kvpool::methods
