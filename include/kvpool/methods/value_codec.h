#pragma once

#include <memory>

#include "kvpool/methods/kv_cache_config.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// The value coder of methods that only say how keys are coded: Int8Values for value_bits 8 (the
/// default), TurboQuantMse with least squared error below. `rotation` may be shared with the keys.
std::unique_ptr<const StreamCodec> make_value_codec(const KVCacheConfig& config,
                                                    std::shared_ptr<const LinearMap> rotation);

}  // namespace kvpool::methods
