// SPDX-License-Identifier: Apache-2.0
//
// What lies between the caller's tensors and the kernels: which tensor a kernel reads where it is, and what is first
// written into the workspace in a shape that it can read (aligned rows, bits, sums of broadcast biases, pairs of fp16).
// A pure function of the problem, the strides and the alignment of the addresses.
#pragma once

#include <vector>

#include "core/problem.h"
#include "cuda/config/workspace.h"
#include "cuda/device/args.h"
#include "cuda/device/around/prepare_args.h"
#include "cuda/device/spec.h"

namespace fovea::cuda {

// Where a kernel finds a tensor.
struct Operand {
  Region region = Region::kNone;
  math::Strides strides;
};

// What a copy reads.
using Member = const View Call::*;

struct Pack {
  Member from;
  Region to;
  int element_bytes;
  Box box;
  std::int64_t columns;
};

struct Term {
  std::vector<Member> biases;
  bool mask = false;
  Region to;
  Box box;
  std::int64_t columns;
};

struct Operands {
  Features features;
  int head_dim = 0;
  int head_dim_v = 0;
  Operand q, k, v, grad_out, bias, bias2, mask, key_term, query_term;
  std::vector<Pack> packs;  // of elements of 2 bytes first
  bool mask_bits = false;
  bool mask_by_lanes = false;  // the bits' order is that of sm90_mask
  Box mask_box;
  std::vector<Term> terms;
  int grad_bias_pack = -1;     // the bias's, where dS goes to its place and from there to grad_bias; -1: straight there
  bool vector_stores = false;  // results may be written by 16 bytes
  bool odd_rows = false;       // of the bias, which is read where it lies, and of its gradient: they begin anywhere
  bool pairs = false;          // q, k, v (and grad_out) are split into pairs of fp16
};

// Whether scores may stay dot products that the exponent scales: in their order, not near the least numbers, and not
// so large that a row's reference, rounded, is off by more than a weight can be.
bool exponent_scales(const Problem& problem);

// The results that Features::fp32_results is for: of fp32 where q has 16 bits, or added to what is there. Of biases and
// the sink those that are added: their gradients have types of their own.
Results fp32_results(const Problem& problem);

// The types as kernels name them. Throw Error(FOVEA_UNSUPPORTED) for one that no kernel has.
Type type_of(DType type);
BiasTile tile_of(DType type);

// The dimensions in which what is read changes: one that was given with a stride of 0 is as good as broadcast.
Extents extents_of(const View& view, const PlaneTraits& traits);

// How many planes a bias or mask has: its heads and batch entries.
std::int64_t planes_of(const Problem& problem, const Extents& extents);

// Adds the regions that it needs. Throws Error(FOVEA_UNSUPPORTED) where no kernel could. mask_by_lanes: as sm90_forward
// takes masks: one that is broadcast over queries becomes bits, too, and bits lie as its threads need them. odd_rows: a
// bias with odd rows is not packed.
Operands operands_of(const Call& call, Workspace& workspace, bool mask_by_lanes = false, bool odd_rows = false);

// Whether rows of this view can be read (written) by 16 bytes.
bool is_aligned(const Call& call, const View& view, std::int64_t heads, std::int64_t rows, std::int64_t columns);

}  // namespace fovea::cuda
