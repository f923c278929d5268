// SPDX-License-Identifier: Apache-2.0
//
// The Specs of Hopper's kernels. Read by the host and, without any header, by NVRTC.
#pragma once

#include "cuda/device/spec.h"

namespace fovea::cuda {

// sm90_forward.
struct Sm90ForwardTiles {
  int warps = 8;           // that compute: four are a warpgroup of 64 queries
  int step = 128;          // keys of a step of the loop; with pairs, those of one block
  int stages = 2;          // buffers of K and V; with pairs of V alone (sm90_key_buffers)
  int ctas = 1;            // blocks a multiprocessor that registers are limited for
  int q_buffers = 1;       // of Q and O: 2, and the next tile's Q is there before this one ends
  int planes = 0;          // buffers of biases and key terms
  bool resident = false;   // Q stays in registers
  int ahead = 0;           // blocks of 16 keys weighed before O of the step before is awaited: none, or all
  bool left_edge = false;  // banded from the left as well: a window
  bool turns = false;      // the warpgroups that compute take turns at issuing products
  bool guess = false;      // the first reference of a row is any score of it
  bool prepared = false;   // warps that do not copy make a mask of keys into columns of K, ahead
  bool early = false;      // dropout's random words are made before a step's weights
  bool often = false;      // dropout's threshold is over 0x7c00: about half of the numbers, or more, are dropped
  bool split = false;      // a tile has a part of its keys; partial results go to the workspace
  bool joins = false;      // the last tiles, or all, have parts, too, and the part that ends last puts them together
  bool pairs = false;      // two blocks have a tile: each half of a step's keys, and half of V's columns, `dv`

  friend constexpr bool operator==(const Sm90ForwardTiles&, const Sm90ForwardTiles&) = default;
};
FOVEA_FIELDS(Sm90ForwardTiles, warps, step, stages, ctas, q_buffers, planes, resident, ahead, left_edge, turns, guess,
             prepared, early, often, split, joins, pairs)

struct Sm90ForwardSpec : Features, Sm90ForwardTiles {
  friend constexpr bool operator==(const Sm90ForwardSpec&, const Sm90ForwardSpec&) = default;
};

// sm90_backward, and those by clusters: summed, wide and split.
struct Sm90BackwardTiles {
  int warps = 8;               // that compute: four are a warpgroup
  int tiles = 1;               // of 64 keys a warpgroup
  int step = 64;               // queries that the loop advances by
  int stages = 2;              // buffers of Q and dO
  int planes = 2;              // buffers of dS, where biases of 16 bits come to lie
  int outer = 1;               // buffers of biases that lie elsewhere, or come there first (odd_rows)
  bool left_edge = false;      // banded from the left as well: a window
  bool delay = false;          // dQ of a step is computed during the next
  bool bulk = false;           // dQ leaves through shared memory, in bulk
  bool halves = false;         // each of two warpgroups takes half of dQ's columns, of every step
  bool same_step = false;      // with halves: dQ of a step is computed in it, before dK
  bool dbias_store = false;    // dS is the gradient of a bias that nothing shares, and is stored as it is
  bool ordered = false;        // blocks of keys add to dQ in their order
  bool direct = false;         // one block has all keys, and dQ is stored as it is
  bool stores_first = false;   // the block that comes first to rows of dq_sum stores there, the others add
  bool converts = false;       // warps that do not compute make dq of rows of dq_sum that all blocks have added to
  bool longest_first = false;  // batch entries are begun in BehindTurns::order
  bool key_parts = false;      // several blocks share a block of keys, each with a part of its steps
  bool last_parts = false;     // with key_parts: of the last blocks of keys alone, and they add their sums up
  bool tile_stores = false;    // dK and dV leave through the places of K and V, by tensor stores
  bool roles = false;          // sm90_wide_backward: one warpgroup makes P, the other dS, of all queries of a step
  bool makes_rows = false;     // with direct: delta is formed here, of out: no backward_prepare
  int summed = 1;              // blocks of a cluster: as many batch entries share a bias, and dS is summed
  bool odd_sums = false;       // with summed: rows of the gradient begin at any address
  bool adds_bias = false;      // dS is added to sums of the bias's gradient in memory (added_bias.h)
  bool odd_rows = false;       // of the bias and of its gradient: they begin at any address (odd_rows.h)

  friend constexpr bool operator==(const Sm90BackwardTiles&, const Sm90BackwardTiles&) = default;
};
FOVEA_FIELDS(Sm90BackwardTiles, warps, tiles, step, stages, planes, outer, left_edge, delay, bulk, halves, same_step,
             dbias_store, ordered, direct, stores_first, converts, longest_first, key_parts, last_parts, tile_stores,
             roles, makes_rows, summed, odd_sums, adds_bias, odd_rows)

struct Sm90BackwardSpec : Features, Gradients, Sm90BackwardTiles {
  friend constexpr bool operator==(const Sm90BackwardSpec&, const Sm90BackwardSpec&) = default;
};

// sm90_bias_gradient.
struct Sm90BiasTiles {
  BiasTile grad_bias = BiasTile::kNone;  // the type that is written
  int warps = 8;                         // that compute, 16 queries each
  int step = 128;                        // keys of a tile
  int part = 64;                         // keys of a product
  int stages = 2;                        // buffers of Q with K and dO with V
  int planes = 0;                        // buffers of the tile of the bias whose gradient it is, Features::bias
  int entries = 0;            // buffers of whatever else is added to scores, which changes with the entry of the list
  bool bias_outside = false;  // the bias is taken out of the sum over the list

  friend constexpr bool operator==(const Sm90BiasTiles&, const Sm90BiasTiles&) = default;
};
FOVEA_FIELDS(Sm90BiasTiles, grad_bias, warps, step, part, stages, planes, entries, bias_outside)

struct Sm90BiasSpec : Features, Sm90BiasTiles {
  friend constexpr bool operator==(const Sm90BiasSpec&, const Sm90BiasSpec&) = default;
};

// sm90_small_backward.
struct Sm90SmallTiles {
  BiasTile grad_bias = BiasTile::kNone;  // the type that is written: that of the bias, or none
  int warps = 8;                         // that compute: four are a warpgroup, which has a head
  int stages = 2;                        // heads that a warpgroup has in flight

  friend constexpr bool operator==(const Sm90SmallTiles&, const Sm90SmallTiles&) = default;
};
FOVEA_FIELDS(Sm90SmallTiles, grad_bias, warps, stages)

struct Sm90SmallSpec : Features, Sm90SmallTiles {
  friend constexpr bool operator==(const Sm90SmallSpec&, const Sm90SmallSpec&) = default;
};

}  // namespace fovea::cuda
