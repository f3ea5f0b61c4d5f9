#pragma once

#include <cstddef>

#include "kvpool/formats/format.h"

namespace kvpool::kernels {

/// One page of a block table, as a kernel sees it: the bytes of a block, in one of
/// formats::kPageFormats.
struct PageRef {
  const std::byte* data = nullptr;
  formats::Format format{};
};

}  // namespace kvpool::kernels
