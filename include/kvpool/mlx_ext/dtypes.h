#pragma once

#include <mlx/array.h>

#include <optional>

#include "kvpool/formats/format.h"

namespace kvpool::mlx_ext {

/// The float format of an array's numbers; nothing for any other dtype.
std::optional<formats::Format> format_of(mlx::core::Dtype dtype) noexcept;

/// The same for an array that was checked. Throws Error for any other dtype.
formats::Format checked_format_of(mlx::core::Dtype dtype);

/// The dtype that numbers of a page come out in: a float format's own, float16 for codes.
mlx::core::Dtype dtype_of(formats::Format format) noexcept;

}  // namespace kvpool::mlx_ext
