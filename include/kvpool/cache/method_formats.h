#pragma once

#include <cstdint>
#include <memory>

#include "kvpool/cache/stream_format.h"
#include "kvpool/formats/format.h"
#include "kvpool/methods/method.h"

namespace kvpool::cache {

/// How a quantised-cache method (methods/registry.h) keeps a layer's keys in pages: a block stays
/// as it came, in `recent`, until it is full and behind the method's exact window; then the codec
/// encodes it, each head by itself. All layers may share a method.
///
/// Throws InvalidArgument where `method` is null, where block_size is no multiple of the tokens
/// that it encodes together (kivi: kivi_group_size), and for what is not of pages: a capacity
/// (windows are the layer's), and outlier channels, which would have to be chosen before the first
/// block.
StreamFormat method_keys(const std::shared_ptr<const methods::Method>& method, std::int64_t n_heads,
                         std::int64_t block_size, formats::Format recent);

/// The same for values. Their method is another one where their head_dim is another.
StreamFormat method_values(const std::shared_ptr<const methods::Method>& method,
                           std::int64_t n_heads, std::int64_t block_size, formats::Format recent);

}  // namespace kvpool::cache
