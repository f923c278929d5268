// SPDX-License-Identifier: Apache-2.0
//
// .safetensors: named tensors in one file.
//
//     header length (8 bytes, little-endian)
//     {"q": {"dtype": "F32", "shape": [1, 2, 3, 4], "data_offsets": [0, 96]}, ..., "__metadata__": {...}}
//     the tensors' bytes, one after the other without gaps or overlaps
//
// Everything that the header claims is held against the file before memory is taken for it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/array.h"

namespace fovea::cli {

Arrays read_safetensors(const std::filesystem::path& path);

// `arrays` are row-major.
void write_safetensors(const std::filesystem::path& path, const Arrays& arrays);

}  // namespace fovea::cli
