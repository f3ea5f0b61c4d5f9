# kvpool_add_layer(<name> [NOT_INSTALLED] [DEPENDS <layer>...])
#
# One layer of the architecture as a target: kvpool_<name>, alias kvpool::<name>, built from every
# .cpp of the calling folder. Links only the named layers below it; a layer without sources is
# header-only. NOT_INSTALLED: no part of the package that find_package(kvpool) reads.
function(kvpool_add_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 layer "NOT_INSTALLED" "" "DEPENDS")
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  if(sources)
    add_library(kvpool_${name} STATIC ${sources})
    set(scope PUBLIC)
    kvpool_compile_options(kvpool_${name})
  else()
    add_library(kvpool_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(kvpool::${name} ALIAS kvpool_${name})
  set_target_properties(kvpool_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(kvpool_${name} ${scope}
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(kvpool_${name} ${scope} cxx_std_20)
  list(TRANSFORM layer_DEPENDS PREPEND kvpool_)
  target_link_libraries(kvpool_${name} ${scope} ${layer_DEPENDS})
  if(NOT layer_NOT_INSTALLED)
    install(TARGETS kvpool_${name} EXPORT kvpoolTargets)
  endif()
endfunction()

# Warnings and sanitizers of everything that is built here; never passed on to consumers.
function(kvpool_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                           -Wno-sign-conversion -Wno-missing-field-initializers)
  if(KVPOOL_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${KVPOOL_SANITIZE}
                                             -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${KVPOOL_SANITIZE})
  endif()
endfunction()
