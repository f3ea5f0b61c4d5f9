#include "kvpool/mlx_ext/dtypes.h"

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext {

using formats::Format;

std::optional<Format> format_of(mlx::core::Dtype dtype) noexcept {
  if (dtype == mlx::core::float32) return Format::kFp32;
  if (dtype == mlx::core::float16) return Format::kFp16;
  if (dtype == mlx::core::bfloat16) return Format::kBf16;
  return std::nullopt;
}

Format checked_format_of(mlx::core::Dtype dtype) {
  if (const auto format = format_of(dtype)) return *format;
  throw Error("[checked_format_of] dtype must be float32, float16 or bfloat16");
}

mlx::core::Dtype dtype_of(Format format) noexcept {
  if (format == Format::kFp32) return mlx::core::float32;
  if (format == Format::kBf16) return mlx::core::bfloat16;
  return mlx::core::float16;
}

}  // namespace kvpool::mlx_ext
