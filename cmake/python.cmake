# SPDX-License-Identifier: Apache-2.0
#
# What a Python wheel holds besides python/fovea: the shared library beside it, as one file (wheels have no links).
install(FILES $<TARGET_FILE:fovea> DESTINATION fovea RENAME libfovea${CMAKE_SHARED_LIBRARY_SUFFIX} COMPONENT python)
