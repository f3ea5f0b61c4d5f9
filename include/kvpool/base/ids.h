#pragma once

#include <cstdint>

namespace kvpool {

/// A request or sequence, named by the caller. Any 64-bit value but those that
/// BlockPoolAllocator::new_owner mints.
using OwnerId = std::int64_t;

/// A block of a pool: minted in ascending order from 0, stable, never used again once retired.
enum class BlockId : std::uint32_t {};

constexpr std::uint32_t value(BlockId id) noexcept { return static_cast<std::uint32_t>(id); }

}  // namespace kvpool
