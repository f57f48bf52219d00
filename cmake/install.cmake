# Install rules and the package that find_package(hbmoff) finds. Nothing installed holds an absolute path.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_DATADIR}/cmake/hbmoff)  # share/, not lib/: headers fit every architecture

install(DIRECTORY include/hbmoff DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh"
  PATTERN "*.cu")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# Two export sets, so that the main one does not ask for fmt.
install(TARGETS hbmoff EXPORT hbmoff-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT hbmoff-targets NAMESPACE hbmoff:: DESTINATION ${package_dir})
install(TARGETS hbmoff_fmt EXPORT hbmoff-fmt-targets)
install(EXPORT hbmoff-fmt-targets NAMESPACE hbmoff:: DESTINATION ${package_dir})

configure_package_config_file(cmake/hbmoff-config.cmake.in hbmoff-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(hbmoff-config-version.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/hbmoff-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/hbmoff-config-version.cmake
  cmake/hbmoff-cuda.cmake DESTINATION ${package_dir})
