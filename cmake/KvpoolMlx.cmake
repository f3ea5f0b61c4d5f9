# Finds the MLX that the layer mlx_ext is built for, and sets MLX_FOUND.
#
# MLX's libraries promise nothing from one version to the next: an extension loads with the very
# version that it was built for, so no other is taken. pyproject.toml pins the same one.
set(KVPOOL_MLX_VERSION 0.32.4)

set(MLX_FOUND FALSE)
if(KVPOOL_BUILD_MLX STREQUAL "ON" OR (KVPOOL_BUILD_MLX STREQUAL "AUTO" AND KVPOOL_BUILD_PYTHON))
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
  if(Python_FOUND AND NOT MLX_DIR AND NOT MLX_ROOT)
    execute_process(COMMAND ${Python_EXECUTABLE} -m mlx --cmake-dir
                    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE MLX_ROOT ERROR_QUIET)
  endif()
  if(KVPOOL_BUILD_MLX STREQUAL "ON")
    find_package(MLX ${KVPOOL_MLX_VERSION} EXACT CONFIG REQUIRED)
  else()
    find_package(MLX ${KVPOOL_MLX_VERSION} EXACT CONFIG QUIET)
  endif()
  if(NOT MLX_FOUND)
    message(STATUS "MLX ${KVPOOL_MLX_VERSION} not found: no paged caches for MLX in this build")
  endif()
endif()
