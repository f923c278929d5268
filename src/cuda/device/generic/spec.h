// SPDX-License-Identifier: Apache-2.0
//
// The Specs of the generic kernels. Read by the host and, without any header, by NVRTC.
#ifndef FOVEA_CUDA_DEVICE_GENERIC_SPEC_H
#define FOVEA_CUDA_DEVICE_GENERIC_SPEC_H

#include "cuda/device/spec.h"

namespace fovea::cuda {

// generic_forward.
struct ForwardTiles {
  int warps = 4;
  int tiles = 2;          // of 16 queries a warp
  int step = 64;          // keys that the loop advances by
  int ctas = 2;           // blocks a multiprocessor that registers are limited for
  bool resident = false;  // Q stays in registers
  bool lazy = false;      // O is rescaled only when a maximum moves by more than 2^8
  bool early = false;     // dropout's random words are made before S
  bool split = false;     // a block has a part of the keys; partial results go to the workspace

  friend constexpr bool operator==(const ForwardTiles&, const ForwardTiles&) = default;
};
template <class Visit>
constexpr void for_each_field(const ForwardTiles& of, Visit visit) {
  constexpr ForwardTiles usual;
  visit("warps", of.warps, usual.warps);
  visit("tiles", of.tiles, usual.tiles);
  visit("step", of.step, usual.step);
  visit("ctas", of.ctas, usual.ctas);
  visit("resident", of.resident, usual.resident);
  visit("lazy", of.lazy, usual.lazy);
  visit("early", of.early, usual.early);
  visit("split", of.split, usual.split);
}

struct ForwardSpec : Features, ForwardTiles {
  friend constexpr bool operator==(const ForwardSpec&, const ForwardSpec&) = default;
};

// generic_wide_forward, whose products S and O have grids of warps of their own.
struct WideForwardTiles {
  int warps = 8;
  int step = 64;       // keys that the loop advances by
  int grid_s = 4;      // warps along the queries of S
  int grid_o = 2;      // and of O
  int part = 512;      // columns of q and k at a time
  int columns = 512;   // of O that a block has at most
  bool split = false;  // a block has a part of the keys; partial results go to the workspace

  friend constexpr bool operator==(const WideForwardTiles&, const WideForwardTiles&) = default;
};
template <class Visit>
constexpr void for_each_field(const WideForwardTiles& of, Visit visit) {
  constexpr WideForwardTiles usual;
  visit("warps", of.warps, usual.warps);
  visit("step", of.step, usual.step);
  visit("grid_s", of.grid_s, usual.grid_s);
  visit("grid_o", of.grid_o, usual.grid_o);
  visit("part", of.part, usual.part);
  visit("columns", of.columns, usual.columns);
  visit("split", of.split, usual.split);
}

struct WideForwardSpec : Features, WideForwardTiles {
  friend constexpr bool operator==(const WideForwardSpec&, const WideForwardSpec&) = default;
};

// The generic backward: a block has keys, and loops over queries; for dq alone and for the gradients of biases it has
// queries.
struct BackwardTiles {
  int warps = 4;
  int tiles = 2;       // of 16 keys (queries) a warp
  int step = 64;       // queries (keys) that the loop advances by
  int part = 0;        // how much of a step lies in registers at a time; 0: all
  int ctas = 2;        // blocks a multiprocessor that registers are limited for
  int grid_s = 1;      // warps along the first dimension of S, where products have grids of their own
  int grid_o = 1;      // warps along the keys of dK and dV; of dq alone: blocks that share its columns
  int grid_q = 1;      // warps along the queries of dQ
  int stages = 2;      // buffers of what the loop reads
  bool delay = false;  // dQ of a step is computed during the next
  BiasTile grad_bias = BiasTile::kNone;  // bias gradients: the type that is written

  friend constexpr bool operator==(const BackwardTiles&, const BackwardTiles&) = default;
};
template <class Visit>
constexpr void for_each_field(const BackwardTiles& of, Visit visit) {
  constexpr BackwardTiles usual;
  visit("warps", of.warps, usual.warps);
  visit("tiles", of.tiles, usual.tiles);
  visit("step", of.step, usual.step);
  visit("part", of.part, usual.part);
  visit("ctas", of.ctas, usual.ctas);
  visit("grid_s", of.grid_s, usual.grid_s);
  visit("grid_o", of.grid_o, usual.grid_o);
  visit("grid_q", of.grid_q, usual.grid_q);
  visit("stages", of.stages, usual.stages);
  visit("delay", of.delay, usual.delay);
  visit("grad_bias", of.grad_bias, usual.grad_bias);
}

struct BackwardSpec : Features, Gradients, BackwardTiles {
  friend constexpr bool operator==(const BackwardSpec&, const BackwardSpec&) = default;
};

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_GENERIC_SPEC_H
