# SPDX-License-Identifier: Apache-2.0
#
# cmake -DSOURCE=src -DOUTPUT=embedded.cpp -P embed.cmake: writes embedded_files() of src/cuda/jit/source.h, the text
# of every file that the kernels are made of, as raw string literals.
cmake_minimum_required(VERSION 3.25)

file(GLOB_RECURSE files RELATIVE ${SOURCE} ${SOURCE}/math/*.h ${SOURCE}/cuda/device/*.cuh ${SOURCE}/cuda/device/*.h)
list(SORT files)

set(texts "")
set(entries "")
set(names "")
foreach(file IN LISTS files)
  string(REGEX REPLACE "^(math|cuda/device)/" "" short ${file})
  if(short IN_LIST names)
    message(FATAL_ERROR "${file}: another file can be included as \"${short}\", too; rename one")
  endif()
  list(APPEND names ${short})
  list(LENGTH names number)
  file(READ ${SOURCE}/${file} text)
  string(APPEND texts "constexpr std::string_view kText${number} = R\"text(${text})text\";\n")
  string(SHA256 hash "${text}")
  string(APPEND entries "      {\"${file}\", kText${number}, \"${hash}\"},\n      {\"${short}\", kText${number}, \"${hash}\"},\n")
endforeach()

file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
// SPDX-License-Identifier: Apache-2.0
//
// Written by cmake/embed.cmake: the text of the kernels.
#include "cuda/jit/source.h"

namespace fovea::cuda::jit {
namespace {

@texts@
}  // namespace

std::span<const TextFile> embedded_files() {
  static const TextFile files[] = {
@entries@  };
  return files;
}

}  // namespace fovea::cuda::jit
]])
