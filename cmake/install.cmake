# SPDX-License-Identifier: Apache-2.0
#
# `cmake --install`: the library, its headers, the command, and what find_package(fovea) and pkg-config read. The
# installed tree may be moved. examples/installed uses one.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS fovea EXPORT foveaTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET fovea_cli)
  install(TARGETS fovea_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} OPTIONAL)
endif()

set(FOVEA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
install(EXPORT foveaTargets NAMESPACE fovea:: DESTINATION ${FOVEA_PACKAGE_DIR})
configure_package_config_file(cmake/foveaConfig.cmake.in ${PROJECT_BINARY_DIR}/cmake/foveaConfig.cmake
                              INSTALL_DESTINATION ${FOVEA_PACKAGE_DIR})
# Before 1.0 a minor version may change what the one before it promised.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/foveaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/foveaConfig.cmake ${PROJECT_BINARY_DIR}/cmake/foveaConfigVersion.cmake
        DESTINATION ${FOVEA_PACKAGE_DIR})

set(FOVEA_PKGCONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH FOVEA_PREFIX_FROM_PKGCONFIG /prefix/${FOVEA_PKGCONFIG_DIR} /prefix)
set(FOVEA_PKGCONFIG_LIBRARIES "")
if(NOT FOVEA_SHARED)
  set(FOVEA_PKGCONFIG_LIBRARIES " -lstdc++ -lm -pthread -ldl")
endif()
configure_file(cmake/fovea.pc.in ${PROJECT_BINARY_DIR}/cmake/fovea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/fovea.pc DESTINATION ${FOVEA_PKGCONFIG_DIR})
