#pragma once

#include <string>

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext {

/// For eval_gpu of primitives whose kernels run on the CPU alone; graph.h puts none on a GPU's
/// stream.
[[noreturn]] inline void throw_no_gpu(const char* primitive) {
  throw Error("[" + std::string(primitive) + "::eval_gpu] there is no kernel for GPUs");
}

}  // namespace kvpool::mlx_ext
