// SPDX-License-Identifier: Apache-2.0
//
// Which rows of a sequence, or of packed sequences, each rank of a group has. The C ABI, the command `fovea rows` and
// the Python package have their plans from here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/c.h"

namespace fovea {

// Adjacent rows of one sequence.
struct Piece {
  std::int64_t sequence = 0;
  std::int64_t start = 0;
  std::int64_t rows = 0;
};

// The pieces of each rank, in the order in which they lie in its memory.
using Pieces = std::vector<std::vector<Piece>>;

// What fovea_rows_plan() does.
void share_rows(const fovea_rows& asked, std::int64_t* needed);

}  // namespace fovea
