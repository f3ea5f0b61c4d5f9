#include "kvpool/cache/method_formats.h"

#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool::cache {

using formats::Format;
using methods::Method;
using methods::StreamCodec;

namespace {

StreamFormat format_of(const std::shared_ptr<const Method>& method,
                       std::unique_ptr<const StreamCodec> Method::* stream, std::int64_t n_heads,
                       std::int64_t block_size, Format recent) {
  if (method == nullptr) throw InvalidArgument("[StreamFormat] method must not be null");
  const methods::KVCacheConfig& config = method->config;
  if (config.capacity) {
    throw InvalidArgument("[StreamFormat] capacity must be None in pages, got " +
                          std::to_string(*config.capacity));
  }
  if (config.n_outlier_channels != 0) {
    throw InvalidArgument("[StreamFormat] n_outlier_channels must be 0 in pages, got " +
                          std::to_string(config.n_outlier_channels));
  }
  // Every head shares the codec, and the codec keeps its method.
  const std::shared_ptr<const StreamCodec> codec(method, ((*method).*stream).get());
  AgeTier tier;
  tier.after_tokens = config.residual_length.value_or(0);
  tier.codec = std::make_shared<const PageCodec>(
      config.method + "-" + std::to_string(config.bit_width_inlier),
      std::vector<std::shared_ptr<const StreamCodec>>(static_cast<std::size_t>(n_heads), codec),
      block_size);
  return {recent, {std::move(tier)}};
}

}  // namespace

StreamFormat method_keys(const std::shared_ptr<const Method>& method, std::int64_t n_heads,
                         std::int64_t block_size, Format recent) {
  return format_of(method, &Method::keys, n_heads, block_size, recent);
}

StreamFormat method_values(const std::shared_ptr<const Method>& method, std::int64_t n_heads,
                           std::int64_t block_size, Format recent) {
  return format_of(method, &Method::values, n_heads, block_size, recent);
}

}  // namespace kvpool::cache
