// SPDX-License-Identifier: Apache-2.0
//
// NumPy's .npy: one array a file. Little-endian numbers of the types that fovea knows; C or Fortran order. The format
// has no bf16: such an array has to come, and go, as .safetensors.
//
//     \x93NUMPY  major minor  header length (2 bytes; from version 2 on 4)
//     {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  blanks, newline
//     the elements
#pragma once

#include <filesystem>

#include "io/array.h"

namespace fovea::cli {

Array read_npy(const std::filesystem::path& path);

// Whether the format has the type.
bool npy_carries(fovea_dtype dtype);
// `array` is row-major.
void write_npy(const std::filesystem::path& path, const Array& array);

}  // namespace fovea::cli
