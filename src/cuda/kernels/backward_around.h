// SPDX-License-Identifier: Apache-2.0
//
// A backward's main kernels, whichever they are: what they are wanted for, and what they need before and after them:
// vectors of the rows, conversion of dq's sums, and the sums of which gradients of sinks and broadcast biases are made.
#pragma once

#include "cuda/launch/launcher.h"
#include "cuda/planner.h"

namespace fovea::cuda {

// What a key-stationary kernel computes.
struct BackwardWants {
  bool dq = false;  // added to dq_sum; only together with dkv
  bool dkv = false;
  bool column_sum = false;
  bool row_sum = false;      // by atomics: sm90_backward
  bool dbias_store = false;  // dS is stored as the gradient of a bias: sm90_backward
  bool ordered = false;      // dq is added in a fixed order: sm90_backward
  bool bias = false;         // the gradient of the first bias: it has queries and keys, and no other one has
};

// A gradient of a bias, and what a plane of it is the sum of.
struct BiasList {
  int which = 0;  // 0: of bias, 1: of bias2
  std::int64_t planes = 0;
  std::int64_t entries = 0;  // (b, h) pairs that share a plane
  std::int64_t queries = 0;  // 1 where it is broadcast over them
  std::int64_t keys = 0;
};
BiasList bias_list_of(const Problem& problem, int which);

// logsumexp and <do, o> of every row. Spec: type, dq_columns as d, dv, stores_first.
void add_backward_prepare(Planner& planner, const AroundSpec& spec);

// dq from its fp32 sums, kConvertRows rows a block.
void add_backward_convert(Planner& planner, const AroundSpec& spec, std::int64_t blocks);

void add_reduce_sink(Planner& planner);

// Gradients of biases without queries, and without keys.
void add_reduce_columns(Planner& planner, BiasTile type, const BiasList& list);
void add_reduce_rows(Planner& planner, BiasTile type, const BiasList& list);

// What a bias gradient's kernel is called with, its list in so many chunks.
Args bias_gradient_args(const Launcher& launcher, const BiasList& list, int chunks);

// Numbers that sums of a bias's gradient within the main kernel may have: 1.5 times those of dq, of head_dim d.
std::int64_t most_bias_sums(const Call& call, int d);

// Memory for partial sums of all planes a chunk; nothing for one chunk.
void reserve_bias_sum(Planner& planner, const BiasList& list, int chunks);

// The gradient from planes of sums, one for each chunk.
void add_bias_sum(Planner& planner, BiasTile type, const BiasList& list, int chunks);

}  // namespace fovea::cuda
