# The install tree: headers, one static library a layer, and the package that find_package(kvpool)
# reads.
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvpool TYPE INCLUDE)
set(kvpool_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvpool)
install(EXPORT kvpoolTargets NAMESPACE kvpool:: DESTINATION ${kvpool_package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/kvpoolConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/kvpoolConfig.cmake
                              INSTALL_DESTINATION ${kvpool_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvpoolConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvpoolConfig.cmake
              ${PROJECT_BINARY_DIR}/kvpoolConfigVersion.cmake
        DESTINATION ${kvpool_package_dir})
