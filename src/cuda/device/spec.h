// SPDX-License-Identifier: Apache-2.0
//
// Spec: what a kernel is compiled for. The planner fills it (src/cuda/kernels), print() writes it as a template
// argument, the kernel takes it as its one template parameter. Everything else about a call is in Args.
// Read by the host and, without any header, by NVRTC.
#ifndef FOVEA_CUDA_DEVICE_SPEC_H
#define FOVEA_CUDA_DEVICE_SPEC_H

namespace fovea::cuda {

// Of q, k, v and whatever has their type. fp32 travels through the tensor cores as pairs of fp16 (docs/cuda.md).
enum class Type : int { kBf16, kFp16, kFp32 };

// A bias that has both queries and keys, read tile by tile. What is broadcast over queries or over keys is no tile:
// it reaches the kernels as fp32 vectors (key_term, query_term).
enum class BiasTile : int { kNone, kBf16, kFp16, kFp32 };

enum class DropoutRule : int { kNone, kFovea, kTorchMemEfficient };

struct Spec {
  int arch = 80;  // of the device: 80, 86, 89, 90, 100, 120
  Type type = Type::kBf16;
  int d = 64;   // head_dim, up to the next multiple of 16
  int dv = 64;  // of v and out, likewise

  // ---- features ----
  bool banded = false;  // causal or a window; otherwise every query meets every key
  bool ragged = false;  // lengths differ by batch entry: packed, or seqused given
  bool softcap = false;
  BiasTile bias = BiasTile::kNone;
  BiasTile bias2 = BiasTile::kNone;
  bool mask = false;      // bits, a word for 32 keys
  bool key_term = false;  // added a key: biases and masks that are broadcast over queries
  bool key_mask = false;  // forward: key_term is 0 or -inf everywhere, a mask alone; with `mask`: its bits are of keys
  bool query_term = false;  // added a query: biases and masks that are broadcast over keys
  bool alibi = false;
  DropoutRule dropout = DropoutRule::kNone;

  // ---- backward: what is computed here ----
  bool dq = false;
  bool dkv = false;
  bool column_sum = false;               // sums of dS over queries, for biases that are broadcast over them
  bool row_sum = false;                  // sums of dS over keys, for biases that are broadcast over them
  BiasTile grad_bias = BiasTile::kNone;  // the type that a kernel of bias gradients writes

  // ---- configuration: sizes that the kernel asserts, not features ----
  int warps = 4;
  int tiles = 2;          // row tiles of 16 a warp: of queries in the forward, of keys in the backward
  int step = 64;          // what the loop advances by: keys in the forward, queries in the backward
  int part = 64;          // how much of a step lies in registers at a time
  int stages = 2;         // buffers of what the loop reads
  int ctas = 2;           // blocks a multiprocessor that registers are limited for
  int grid_s = 1;         // warps along the first dimension of S, where products have grids of their own
  int grid_o = 1;         // of O, or of dK and dV
  int grid_q = 1;         // of dQ: warps along its queries
  int columns = 512;      // of O that a block of the wide forward has at most
  bool resident = false;  // forward: Q stays in registers
  bool lazy = false;      // forward: O is rescaled only when a maximum moves by more than 2^8
  bool early = false;     // forward: random words are made before S (Hopper: before a step's weights)
  bool natural = false;   // forward: scores are scaled before their maximum is taken: for a scale that is not positive,
                          // under 2^-100 or over 2^20; otherwise the exponent scales them
  bool delay = false;     // backward: dQ of a step is computed during the next
  bool split = false;     // forward: a block has a part of the keys; partial results go to the workspace

  // ---- configuration of the kernels for Hopper ----
  int q_buffers = 1;          // buffers of Q (and O): 2, and the next tile's Q is there before this one ends
  int planes = 0;             // buffers of biases and key terms
  int ahead = 0;              // blocks of 16 keys weighed before O of the step before is awaited: none, or all
  bool left_edge = false;     // banded from the left as well: a window
  bool turns = false;         // the warpgroups that compute take turns at issuing products
  bool guess = false;         // the first reference of a row is any score of it
  bool prepared = false;      // forward: warps that do not copy make a mask of keys into columns of K, ahead
  bool often = false;         // dropout's threshold is over 0x7c00: about half of the numbers, or more, are dropped
  bool bulk = false;          // backward: dQ leaves through shared memory, in bulk
  bool halves = false;        // backward: each of two warpgroups takes half of dQ's columns, of every step
  bool same_step = false;     // backward, with halves: dQ of a step is computed in it, before dK
  bool dbias_store = false;   // backward: dS is the gradient of a bias that nothing shares, and is stored as it is
  bool ordered = false;       // backward: blocks of keys add to dQ in their order
  bool direct = false;        // backward: one block has all keys, and dQ is stored as it is
  bool stores_first = false;  // backward: who comes first to rows of dq_sum stores there, the others add
  bool key_parts = false;     // backward: several blocks share a block of keys, each with a part of its steps
  bool bias_outside = false;  // sm90_bias_gradient: the bias is taken out of the sum over the list

  // A new field goes into for_each_field, too.
  friend constexpr bool operator==(const Spec&, const Spec&) = default;
};

// visit(name, value, value by default) for every field, in the order in which they are declared:
// what the host prints a template argument from, which a compiler takes in that order alone.
template <class Visit>
constexpr void for_each_field(const Spec& spec, Visit visit) {
  constexpr Spec usual;
  visit("arch", spec.arch, usual.arch);
  visit("type", spec.type, usual.type);
  visit("d", spec.d, usual.d);
  visit("dv", spec.dv, usual.dv);
  visit("banded", spec.banded, usual.banded);
  visit("ragged", spec.ragged, usual.ragged);
  visit("softcap", spec.softcap, usual.softcap);
  visit("bias", spec.bias, usual.bias);
  visit("bias2", spec.bias2, usual.bias2);
  visit("mask", spec.mask, usual.mask);
  visit("key_term", spec.key_term, usual.key_term);
  visit("key_mask", spec.key_mask, usual.key_mask);
  visit("query_term", spec.query_term, usual.query_term);
  visit("alibi", spec.alibi, usual.alibi);
  visit("dropout", spec.dropout, usual.dropout);
  visit("dq", spec.dq, usual.dq);
  visit("dkv", spec.dkv, usual.dkv);
  visit("column_sum", spec.column_sum, usual.column_sum);
  visit("row_sum", spec.row_sum, usual.row_sum);
  visit("grad_bias", spec.grad_bias, usual.grad_bias);
  visit("warps", spec.warps, usual.warps);
  visit("tiles", spec.tiles, usual.tiles);
  visit("step", spec.step, usual.step);
  visit("part", spec.part, usual.part);
  visit("stages", spec.stages, usual.stages);
  visit("ctas", spec.ctas, usual.ctas);
  visit("grid_s", spec.grid_s, usual.grid_s);
  visit("grid_o", spec.grid_o, usual.grid_o);
  visit("grid_q", spec.grid_q, usual.grid_q);
  visit("columns", spec.columns, usual.columns);
  visit("resident", spec.resident, usual.resident);
  visit("lazy", spec.lazy, usual.lazy);
  visit("early", spec.early, usual.early);
  visit("natural", spec.natural, usual.natural);
  visit("delay", spec.delay, usual.delay);
  visit("split", spec.split, usual.split);
  visit("q_buffers", spec.q_buffers, usual.q_buffers);
  visit("planes", spec.planes, usual.planes);
  visit("ahead", spec.ahead, usual.ahead);
  visit("left_edge", spec.left_edge, usual.left_edge);
  visit("turns", spec.turns, usual.turns);
  visit("guess", spec.guess, usual.guess);
  visit("prepared", spec.prepared, usual.prepared);
  visit("often", spec.often, usual.often);
  visit("bulk", spec.bulk, usual.bulk);
  visit("halves", spec.halves, usual.halves);
  visit("same_step", spec.same_step, usual.same_step);
  visit("dbias_store", spec.dbias_store, usual.dbias_store);
  visit("ordered", spec.ordered, usual.ordered);
  visit("direct", spec.direct, usual.direct);
  visit("stores_first", spec.stores_first, usual.stores_first);
  visit("key_parts", spec.key_parts, usual.key_parts);
  visit("bias_outside", spec.bias_outside, usual.bias_outside);
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SPEC_H
