#include "kvpool/core/pool_config.h"

#include <string>

#include "kvpool/base/error.h"

namespace kvpool::core {

void PoolConfig::validate() const {
  auto refuse = [](const std::string& what) { throw InvalidArgument("[PoolConfig] " + what); };
  if (block_size < 1) refuse("block_size must be >= 1, got " + std::to_string(block_size));
  if (block_size > kMaxBlockSize) {
    refuse("block_size must be <= " + std::to_string(kMaxBlockSize) + ", got " +
           std::to_string(block_size));
  }
  if (n_blocks < 1) refuse("n_blocks must be >= 1, got " + std::to_string(n_blocks));
  if (n_blocks > kMaxBlocks) {
    refuse("n_blocks must be <= " + std::to_string(kMaxBlocks) + ", got " +
           std::to_string(n_blocks));
  }
  if (grow_on_exhaustion && max_blocks && *max_blocks < n_blocks) {
    refuse("max_blocks must be >= n_blocks (" + std::to_string(n_blocks) + "), got " +
           std::to_string(*max_blocks));
  }
}

}  // namespace kvpool::core
