#pragma once

#include <cstddef>

#include "kvpool/formats/format.h"

namespace kvpool::kernels {

/// One page of a block table, as a kernel sees it: where it lies and how its numbers lie in it.
struct PageRef {
  const std::byte* data = nullptr;
  formats::Format format{};
};

}  // namespace kvpool::kernels
