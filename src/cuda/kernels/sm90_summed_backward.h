// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias that batch entries share, within the backward for Hopper (sm90_summed_backward): which calls
// have it there, and how clusters share the work.
#pragma once

#include "cuda/device/sm90/spec.h"
#include "cuda/kernels/backward_around.h"

namespace fovea::cuda {

// How many blocks of a cluster sum dS, a batch entry each: 1 where another kernel has the bias's gradient.
int sm90_summed_blocks(const Call& call, const Sm90BackwardSpec& spec, const BackwardWants& wants,
                       const Target& target);

// Whether sums go straight to rows of the gradient that begin at any address.
bool sm90_sums_to_odd_rows(const Call& call, const Sm90BackwardSpec& spec, const Target& target);

// A cluster has `rounds` blocks of keys one after the other, whose numbers are `stride` apart.
struct Sm90BiasOrder {
  int chunks = 1;  // clusters that share a plane, each with sums of its own
  int rounds = 1;
  int stride = 1;
  int heads = 1;  // that have a plane each
  int planes = 1;
};
Sm90BiasOrder sm90_bias_order(const Call& call, int summed, const Target& target);
// Clusters of so many blocks that run at once.
std::int64_t sm90_clusters_at_once(int summed, const Target& target);

// Where there are several rounds or chunks: memory for their sums, and the launch that makes the gradient of these.
void add_sm90_bias_sums(Planner& planner, const Sm90BackwardSpec& spec);

}  // namespace fovea::cuda
