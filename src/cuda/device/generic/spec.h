// SPDX-License-Identifier: Apache-2.0
//
// The Specs of the generic kernels. Read by the host and, without any header, by NVRTC.
#pragma once

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
  bool split = false;     // a block has a part of the keys; partial results go to the workspace

  friend constexpr bool operator==(const ForwardTiles&, const ForwardTiles&) = default;
};
FOVEA_FIELDS(ForwardTiles, warps, tiles, step, ctas, resident, lazy, split)

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
FOVEA_FIELDS(WideForwardTiles, warps, step, grid_s, grid_o, part, columns, split)

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
FOVEA_FIELDS(BackwardTiles, warps, tiles, step, part, ctas, grid_s, grid_o, grid_q, stages, delay, grad_bias)

struct BackwardSpec : Features, Gradients, BackwardTiles {
  friend constexpr bool operator==(const BackwardSpec&, const BackwardSpec&) = default;
};

}  // namespace fovea::cuda
