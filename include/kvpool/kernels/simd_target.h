#pragma once

#include <string_view>

namespace kvpool::kernels {

/// The vector instructions that the kernels use on this machine ("AVX3_DL", "NEON", ...), or
/// "scalar" in a build without Highway.
std::string_view simd_target_name();

}  // namespace kvpool::kernels
