# kvpool_embed_kernels(<folder> <output>)
#
# Writes a C++ source that defines cuda::kernel_source(): the .cu and .cuh files of the folder as
# strings, compiled at run time. No CUDA is needed to build.
function(kvpool_embed_kernels folder output)
  file(GLOB files CONFIGURE_DEPENDS ${folder}/*.cu ${folder}/*.cuh)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  set(cases "")
  foreach(file IN LISTS files)
    file(READ ${file} text)
    cmake_path(GET file FILENAME name)
    string(APPEND cases "  if (file == \"${name}\") return R\"kernel(${text})kernel\";\n")
  endforeach()
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [[
#include "kernels.h"

#include <string>

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext::cuda {

std::string_view kernel_source(std::string_view file) {
@cases@  throw Error("[cuda::kernel_source] no source " + std::string(file));
}

}  // namespace kvpool::mlx_ext::cuda
]])
endfunction()
