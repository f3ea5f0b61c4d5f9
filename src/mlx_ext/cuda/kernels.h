#pragma once

#include <string>
#include <string_view>
#include <vector>

struct CUfunc_st;

namespace kvpool::mlx_ext::cuda {

/// The sources under kernels/, built in. Throws Error for a name that is not there.
std::string_view kernel_source(std::string_view file);

/// The function `name` of `file`, compiled with these macros ("NAME=value") when they are first
/// asked for, unless an earlier process left the machine code on disk, and allowed `shared_bytes`
/// of dynamic shared memory. Any thread.
CUfunc_st* kernel(std::string_view file, const char* name, const std::vector<std::string>& macros,
                  int shared_bytes = 0);

}  // namespace kvpool::mlx_ext::cuda
