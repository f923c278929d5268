# SPDX-License-Identifier: Apache-2.0
#
# A toolchain file: zig c++ (of the PyPI package ziglang), which compiles for any Linux and any glibc on any machine.
# tools/wheels.py uses it. FOVEA_ZIG is a folder with cc, c++, ar and ranlib; FOVEA_ZIG_TARGET is "x86_64-linux-gnu.2.28".
# Nothing of this machine's /usr is used: headers come from CMAKE_FIND_ROOT_PATH, libraries from zig. The C++ library is
# LLVM's, linked statically.
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR "${FOVEA_ZIG_TARGET}")
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES FOVEA_ZIG FOVEA_ZIG_TARGET)

# CMake's own tests are not linked: zig would compile its libraries for them, without optimisation.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)

set(CMAKE_C_COMPILER ${FOVEA_ZIG}/cc)
set(CMAKE_CXX_COMPILER ${FOVEA_ZIG}/c++)
set(CMAKE_AR ${FOVEA_ZIG}/ar)
set(CMAKE_RANLIB ${FOVEA_ZIG}/ranlib)

# zig makes debug information, which the linker drops: a seventh of the time to compile.
set(CMAKE_C_FLAGS_INIT -g0)
set(CMAKE_CXX_FLAGS_INIT -g0)

set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# Stripped by the linker: `strip` knows this machine's processor alone.
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
set(CMAKE_EXE_LINKER_FLAGS_INIT -s)
