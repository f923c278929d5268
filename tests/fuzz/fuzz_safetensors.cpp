// SPDX-License-Identifier: Apache-2.0
#include "file_input.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fovea::fuzz::read_as_file(data, size, [](const std::string& path) {
    std::size_t bytes = 0;
    for (const auto& [name, array] : fovea::cli::read_safetensors(path)) {
      bytes += array.bytes.size();
    }
    return bytes;
  });
}
