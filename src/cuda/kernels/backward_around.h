// SPDX-License-Identifier: Apache-2.0
//
// What a backward's main kernels need before and after them, whichever they are: vectors of the rows, conversion of
// dq's sums, and the sums of which gradients of sinks and broadcast biases are made.
#pragma once

#include "cuda/launch/launcher.h"
#include "cuda/planner.h"

namespace fovea::cuda {

// logsumexp and <do, o> of every row. Spec: type, dq_columns as d, dv, stores_first.
void add_backward_prepare(Planner& planner, const AroundSpec& spec);

// dq from its fp32 sums, kConvertRows rows a block.
void add_backward_convert(Planner& planner, const AroundSpec& spec, std::int64_t blocks);

void add_reduce_sink(Planner& planner);

// Gradients of biases without queries, and without keys; `which`: 0 for bias, 1 for bias2.
void add_reduce_columns(Planner& planner, BiasTile type, int which, std::int64_t planes, std::int64_t keys);
void add_reduce_rows(Planner& planner, BiasTile type, int which, std::int64_t planes, std::int64_t queries);

// What a bias gradient's kernel is called with, its list in so many chunks.
Args bias_gradient_args(const Launcher& launcher, int which, int chunks);

// Memory for a plane of partial sums a chunk, of `size` numbers in all planes; nothing for one chunk.
void reserve_bias_sum(Planner& planner, int which, int chunks, std::int64_t size);

// The gradient from the chunks' sums; nothing for one chunk.
void add_bias_sum(Planner& planner, BiasTile type, int which, int chunks, std::int64_t planes, std::int64_t numbers);

}  // namespace fovea::cuda
