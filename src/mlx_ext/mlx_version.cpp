#include "kvpool/mlx_ext/mlx_version.h"

#include <mlx/version.h>

namespace kvpool::mlx_ext {

std::string compiled_mlx_version() {
  return std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
         std::to_string(MLX_VERSION_PATCH);
}

std::string loaded_mlx_version() { return mlx::core::version(); }

}  // namespace kvpool::mlx_ext
