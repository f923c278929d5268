// SPDX-License-Identifier: Apache-2.0
//
// FOVEA_CLEAR_ROWS: rows of the outputs that belong to no sequence become zeros, -inf in lse.
#pragma once

#include <vector>

#include "core/problem.h"

namespace fovea {

// An output that has a row for each query or each key.
struct RowOutput {
  const View* view;
  bool of_keys;
  std::int64_t heads;
  std::int64_t columns;
  bool is_lse;
};

// Those of the call that may have rows without a sequence, whether or not FOVEA_CLEAR_ROWS was given.
std::vector<RowOutput> outputs_to_clear(const Call& call);

// The call's rows, in which offsets can be taken even where there is no sequence at all.
math::Rows rows_to_clear(const Call& call);

// If the problem has FOVEA_CLEAR_ROWS, and its memory is that of this process.
void clear_rows(const Call& call);

}  // namespace fovea
