// SPDX-License-Identifier: Apache-2.0
#include "file_input.h"
#include "io/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fovea::fuzz::read_as_file(data, size,
                                   [](const std::string& path) { return fovea::cli::read_npy(path).bytes.size(); });
}
