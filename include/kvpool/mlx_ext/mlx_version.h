#pragma once

#include <string>

namespace kvpool::mlx_ext {

/// The MLX that this was compiled with: "0.32.4".
std::string compiled_mlx_version();
/// The MLX that is loaded into the process.
std::string loaded_mlx_version();

}  // namespace kvpool::mlx_ext
