#include "kvpool/methods/value_codec.h"

#include <utility>

#include "kvpool/methods/int8_values.h"
#include "kvpool/methods/turboquant_mse.h"

namespace kvpool::methods {

std::unique_ptr<const StreamCodec> make_value_codec(const KVCacheConfig& config,
                                                    std::shared_ptr<const LinearMap> rotation) {
  const std::int64_t bits = config.value_bits.value_or(8);
  if (bits == 8) return std::make_unique<Int8Values>(config.head_dim);
  return std::make_unique<TurboQuantMse>(std::move(rotation), static_cast<int>(bits),
                                         TokenScale::kLeastSquares);
}

}  // namespace kvpool::methods
