// SPDX-License-Identifier: Apache-2.0
//
// What a kernel is compiled for: its one template parameter, a Spec of its own kind, in which a field has one meaning.
// It is made of the features of the problem and of the kernel's tiles (generic/spec.h, sm90/spec.h). The planner fills
// it (src/cuda/kernels), print() writes it as a template argument. Everything else about a call is in Args. What
// several kernels share takes any Spec: template <auto S>. Read by the host and, without any header, by NVRTC.
#ifndef FOVEA_CUDA_DEVICE_SPEC_H
#define FOVEA_CUDA_DEVICE_SPEC_H

#include "cuda/device/score/position_terms.h"

namespace fovea::cuda {

// Of q, k, v and whatever has their type. fp32 travels through the tensor cores as pairs of fp16 (docs/cuda.md).
enum class Type : int { kBf16, kFp16, kFp32 };

// A bias that has both queries and keys, read tile by tile. What is broadcast over queries or over keys is no tile:
// it reaches the kernels as fp32 vectors (key_term, query_term).
enum class BiasTile : int { kNone, kBf16, kFp16, kFp32 };

enum class DropoutRule : int { kNone, kFovea, kTorchMemEfficient };

// for_each_field(spec, visit) calls visit(name, value, value by default) for every field, in the order in which they
// are declared: the one in which a compiler takes designated initialisers. A new field goes there, too.

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
  bool mask = false;        // bits, a word for 32 keys
  bool key_term = false;    // added a key: biases and masks that are broadcast over queries
  bool key_mask = false;    // key_term is 0 or -inf everywhere, a mask alone; with `mask`: its bits are of keys
  bool query_term = false;  // added a query: biases and masks that are broadcast over keys
  PositionTerms positions;
  bool shifted = false;  // rows have positions of a larger problem (shard.h), and a band, a term or dropout reads them
  DropoutRule dropout = DropoutRule::kNone;
  bool natural = false;  // scores are scaled at once: for a scale that is not positive, under 2^-100 or over 2^20;
                         // others, to which nothing is added, the exponent scales

  friend constexpr bool operator==(const Features&, const Features&) = default;
};
template <class Visit>
constexpr void for_each_field(const Features& of, Visit visit) {
  constexpr Features usual;
  visit("arch", of.arch, usual.arch);
  visit("type", of.type, usual.type);
  visit("d", of.d, usual.d);
  visit("dv", of.dv, usual.dv);
  visit("banded", of.banded, usual.banded);
  visit("ragged", of.ragged, usual.ragged);
  visit("softcap", of.softcap, usual.softcap);
  visit("bias", of.bias, usual.bias);
  visit("bias2", of.bias2, usual.bias2);
  visit("mask", of.mask, usual.mask);
  visit("key_term", of.key_term, usual.key_term);
  visit("key_mask", of.key_mask, usual.key_mask);
  visit("query_term", of.query_term, usual.query_term);
  visit("positions", of.positions, usual.positions);
  visit("shifted", of.shifted, usual.shifted);
  visit("dropout", of.dropout, usual.dropout);
  visit("natural", of.natural, usual.natural);
}

// What a kernel of the backward computes.
struct Gradients {
  bool dq = false;
  bool dkv = false;
  bool column_sum = false;  // sums of dS over queries, for biases that are broadcast over them
  bool row_sum = false;     // sums of dS over keys, for biases that are broadcast over them

  friend constexpr bool operator==(const Gradients&, const Gradients&) = default;
};
template <class Visit>
constexpr void for_each_field(const Gradients& of, Visit visit) {
  constexpr Gradients usual;
  visit("dq", of.dq, usual.dq);
  visit("dkv", of.dkv, usual.dkv);
  visit("column_sum", of.column_sum, usual.column_sum);
  visit("row_sum", of.row_sum, usual.row_sum);
}

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
  bool same_step = false;                // likewise
  int converted = 0;                     // backward_prepare: queries of a step where sm90_backward converts, else 0
  bool longest_first = false;            // as in Sm90BackwardTiles
  bool shifted = false;                  // backward_prepare: as in Features, where a step's band is looked at

  friend constexpr bool operator==(const AroundSpec&, const AroundSpec&) = default;
};
template <class Visit>
constexpr void for_each_field(const AroundSpec& of, Visit visit) {
  constexpr AroundSpec usual;
  visit("arch", of.arch, usual.arch);
  visit("type", of.type, usual.type);
  visit("d", of.d, usual.d);
  visit("dv", of.dv, usual.dv);
  visit("ragged", of.ragged, usual.ragged);
  visit("grad_bias", of.grad_bias, usual.grad_bias);
  visit("warps", of.warps, usual.warps);
  visit("dq", of.dq, usual.dq);
  visit("stores_first", of.stores_first, usual.stores_first);
  visit("same_step", of.same_step, usual.same_step);
  visit("converted", of.converted, usual.converted);
  visit("longest_first", of.longest_first, usual.longest_first);
  visit("shifted", of.shifted, usual.shifted);
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SPEC_H
