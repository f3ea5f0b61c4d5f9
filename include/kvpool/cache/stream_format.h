#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cache/page_codec.h"
#include "kvpool/formats/format.h"

namespace kvpool::cache {

/// Blocks all of whose tokens are older than the newest `after_tokens` are demoted to this.
struct AgeTier {
  /// >= 0; 0: as soon as the block is full.
  std::int64_t after_tokens = 0;
  formats::Format format = formats::Format::kInt8;
  /// Where given it encodes the page, and `format` is not looked at.
  std::shared_ptr<const PageCodec> codec;
};

/// How one stream's tokens are kept. New tokens are written in `recent`; full blocks move through
/// the tiers as they age. A method's codec is a tier with after_tokens 0 over an exact `recent`:
/// tokens that do not fill a block yet stay exact.
struct StreamFormat {
  formats::Format recent = formats::Format::kFp16;
  /// after_tokens and age rise, page sizes fall.
  std::vector<AgeTier> tiers;
};

/// One layer of a paged cache.
struct PagedLayerSpec {
  std::int64_t n_kv_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  StreamFormat keys;
  StreamFormat values;
  /// Tokens that a query sees, its own included; 0: all. Blocks that no query will see go back.
  std::int64_t window = 0;
};

}  // namespace kvpool::cache
