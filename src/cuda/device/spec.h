// SPDX-License-Identifier: Apache-2.0
//
// What a kernel is compiled for: its one template parameter, a Spec of its own kind, in which a field has one meaning.
// It is made of the features of the problem and of the kernel's tiles (generic/spec.h, sm90/spec.h). The planner fills
// it (src/cuda/kernels), print() writes it as a template argument. Everything else about a call is in Args. What
// several kernels share takes any Spec: template <auto S>. Read by the host and, without any header, by NVRTC.
#pragma once

#include "cuda/device/score/position_terms.h"

namespace fovea::cuda {

// Of q, k, v and whatever has their type. fp32 travels through the tensor cores as pairs of fp16 (docs/cuda.md).
enum class Type : int { kBf16, kFp16, kFp32 };

// A bias that has both queries and keys, read tile by tile. What is broadcast over queries or over keys is no tile:
// it reaches the kernels as fp32 vectors (key_term, query_term).
enum class BiasTile : int { kNone, kBf16, kFp16, kFp32 };

enum class DropoutRule : int { kNone, kFovea, kTorchMemEfficient };

// Of the problem: what every kernel that forms scores has.
struct Features {
  int arch = 80;  // of the device: 80, 86, 89, 90, 100, 120
  Type type = Type::kBf16;
  int d = 64;           // head_dim, up to the next multiple of 16
  int dv = 64;          // of v and out, likewise
  bool banded = false;  // causal or a window; otherwise every query meets every key
  bool ragged = false;  // lengths differ by batch entry: packed, or seqused given
  bool softcap = false;
  BiasTile bias = BiasTile::kNone;
  BiasTile bias2 = BiasTile::kNone;
  bool mask = false;        // bits (their order: Args::mask)
  bool key_term = false;    // added a key: biases and masks that are broadcast over queries
  bool key_mask = false;    // key_term is 0 or -inf everywhere, a mask alone; with `mask`: its bits are of keys
  bool query_term = false;  // added a query: biases and masks that are broadcast over keys
  PositionTerms positions;
  bool shifted = false;  // rows have positions of a larger problem (shard.h), and a band, a term or dropout reads them
  DropoutRule dropout = DropoutRule::kNone;
  bool natural = false;       // scores are scaled at once: for a scale that is not positive, under 2^-100 or over 2^20;
                              // others, to which nothing is added, the exponent scales
  bool fp32_results = false;  // this kernel has results of fp32 where q has 16 bits, or adds them to what is there:
                              // ResultArgs says which; the gradient of a bias: it is added

  friend constexpr bool operator==(const Features&, const Features&) = default;
};
FOVEA_FIELDS(Features, arch, type, d, dv, banded, ragged, softcap, bias, bias2, mask, key_term, key_mask, query_term,
             positions, shifted, dropout, natural, fp32_results)

// What a kernel of the backward computes.
struct Gradients {
  bool dq = false;
  bool dkv = false;
  bool column_sum = false;  // sums of dS over queries, for biases that are broadcast over them
  bool row_sum = false;     // sums of dS over keys, for biases that are broadcast over them

  friend constexpr bool operator==(const Gradients&, const Gradients&) = default;
};
FOVEA_FIELDS(Gradients, dq, dkv, column_sum, row_sum)

// Kernels before and after the main ones: what of the main kernel, or of the problem, they depend on.
struct AroundSpec {
  int arch = 80;  // as in Features
  Type type = Type::kBf16;
  int d = 64;
  int dv = 64;
  bool ragged = false;
  BiasTile grad_bias = BiasTile::kNone;  // the type of the gradient that is written
  int warps = 4;                         // sm90_schedule: those of sm90_forward
  bool dq = false;                       // sm90_backward_parts: dq is converted as well
  bool stores_first = false;             // as in Sm90BackwardTiles
  bool halves = false;                   // dq_sum lies by halves of columns, in 64 rows
  bool turned_dq = false;                // dq_sum lies as sm90_turns_dq() says
  int converted = 0;                     // backward_prepare: queries of a step where sm90_backward converts, else 0
  bool longest_first = false;            // as in Sm90BackwardTiles
  bool shifted = false;                  // backward_prepare: as in Features, where a step's band is looked at
  bool fp32_results = false;             // as in Features; backward_prepare: out is of fp32

  friend constexpr bool operator==(const AroundSpec&, const AroundSpec&) = default;
};
FOVEA_FIELDS(AroundSpec, arch, type, d, dv, ragged, grad_bias, warps, dq, stores_first, halves, turned_dq, converted,
             longest_first, shifted, fp32_results)

}  // namespace fovea::cuda
