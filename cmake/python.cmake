# SPDX-License-Identifier: Apache-2.0
#
# What a Python wheel holds besides python/fovea: the shared library beside it, as one file (wheels have no links, so its
# name has no version), fovea.torch's fast path, fovea.jax's handlers, the headers, the command if it was built, and the licences of what is linked into them.
set_property(TARGET fovea PROPERTY VERSION)
set_property(TARGET fovea PROPERTY SOVERSION)
install(FILES $<TARGET_FILE:fovea> DESTINATION fovea RENAME libfovea${CMAKE_SHARED_LIBRARY_SUFFIX} COMPONENT python)
foreach(module IN ITEMS fovea_fast fovea_xla)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION fovea COMPONENT python)
  endif()
endforeach()
install(DIRECTORY include/fovea DESTINATION fovea/include COMPONENT python FILES_MATCHING PATTERN "*.h")
if(FOVEA_COMMAND)
  install(PROGRAMS $<TARGET_FILE:fovea_cli> DESTINATION fovea/bin COMPONENT python)
endif()
set(FOVEA_LICENSES "" CACHE PATH "A folder with the licences of what is linked statically, for the wheel")
if(FOVEA_LICENSES)
  install(DIRECTORY ${FOVEA_LICENSES}/ DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT python)
endif()
