// SPDX-License-Identifier: Apache-2.0
//
// One query a head, and several heads that read the same keys: decoding with grouped heads. Such a group is computed as
// the queries of one head, so that its keys are read once. A pure function of the problem and its strides.
#pragma once

#include "core/problem.h"

namespace fovea::cuda {

// Nothing that the call asks for tells the heads of a group, or a query from the others, apart.
bool packs_heads(const Call& call);

// The same call with a head for each key head, whose queries are the heads that read it.
Call with_packed_heads(const Call& call);

}  // namespace fovea::cuda
