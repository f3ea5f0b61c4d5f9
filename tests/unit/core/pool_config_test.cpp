#include "kvpool/core/pool_config.h"

#include <gtest/gtest.h>

#include "kvpool/base/error.h"

namespace kvpool::core {
namespace {

TEST(PoolConfig, defaults_are_valid) { EXPECT_NO_THROW(PoolConfig{}.validate()); }

TEST(PoolConfig, names_the_field_out_of_range_and_its_value) {
  auto message = [](PoolConfig config) {
    try {
      config.validate();
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("valid");
  };
  EXPECT_EQ(message({.block_size = 0}), "[PoolConfig] block_size must be >= 1, got 0");
  EXPECT_EQ(message({.n_blocks = -1}), "[PoolConfig] n_blocks must be >= 1, got -1");
  EXPECT_EQ(message({.n_blocks = 8, .grow_on_exhaustion = true, .max_blocks = 7}),
            "[PoolConfig] max_blocks must be >= n_blocks (8), got 7");
  // Without growth the bound is not looked at.
  EXPECT_EQ(message({.n_blocks = 8, .max_blocks = 7}), "valid");
  EXPECT_EQ(message({.block_size = PoolConfig::kMaxBlockSize + 1}),
            "[PoolConfig] block_size must be <= 2147483647, got 2147483648");
  EXPECT_EQ(message({.n_blocks = PoolConfig::kMaxBlocks + 1}),
            "[PoolConfig] n_blocks must be <= 2147483647, got 2147483648");
  EXPECT_EQ(message({.block_size = PoolConfig::kMaxBlockSize}), "valid");
}

}  // namespace
}  // namespace kvpool::core
