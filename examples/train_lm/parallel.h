// SPDX-License-Identifier: Apache-2.0
//
// One function: run a loop's independent turns on all cores. The threads are made once and sleep between calls.
// What a turn computes must not depend on which thread runs it, or on how many there are: then neither do the results.
#pragma once

#include <cstdint>
#include <functional>

namespace train_lm {

// To be called before the first parallel_for(); by default there is one thread.
void set_threads(int threads);
int threads();

// body(i) for every 0 <= i < count, in any order. Not to be nested.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body);

}  // namespace train_lm
