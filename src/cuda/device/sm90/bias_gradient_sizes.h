// SPDX-License-Identifier: Apache-2.0
//
// What sm90_bias_gradient takes for a Spec: warpgroups, threads, where what lies in shared memory. Asked by the planner
// on the host and by the kernel itself, so that the two cannot disagree.
#pragma once

#include "cuda/device/generic/sizes.h"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/spec.h"
#include "cuda/device/tile/plan.h"
#include "math/small_cap.h"

namespace fovea::cuda {

// The bias alone, which stays for all entries of a list.
constexpr Features bias_of_tile(const Features& s) {
  Features tile;
  tile.type = s.type;
  tile.bias = s.bias;
  tile.natural = true;
  return tile;
}

// Everything else, which changes with the entry. Scores that the bias is added to are in natural units.
constexpr Sm90BiasSpec scores_of_entry(const Sm90BiasSpec& s) {
  Sm90BiasSpec entry = s;
  entry.bias = BiasTile::kNone;
  entry.natural = s.natural || !s.bias_outside;
  return entry;
}

// Numbers of tiles on their way from the warp that takes them to all others.
constexpr int kBiasTileNumbers = 2;

struct Sm90BiasGradientSizes {
  int groups;   // warpgroups that compute
  int threads;  // with the one that copies
  int rows;     // queries of a tile
  int part;     // keys of a product
  int parts;    // of a tile's keys

  int vector_buffers;  // every second unit has row vectors

  // Bytes: Q with K or dO with V; logsumexp and delta; a part of the bias's tile and of an entry's inputs.
  int unit, vectors, tile, entry;
  int vectors_at, tile_at, entry_at, barriers_at, numbers_at;
  int bytes;  // all of it
};

constexpr Sm90BiasGradientSizes sm90_bias_gradient_sizes(const Sm90BiasSpec& s) {
  Sm90BiasGradientSizes x{};
  x.groups = s.warps / 4;
  x.threads = 128 * (x.groups + 1);
  x.rows = 16 * s.warps;
  x.part = s.part;
  x.parts = s.step / s.part;
  x.vector_buffers = (s.stages + 1) / 2;
  x.unit = whole_patterns((x.rows + s.step) * (s.d > s.dv ? s.d : s.dv) * 2);
  x.vectors = x.rows * 8;
  x.tile = score_input_bytes(bias_of_tile(s), x.rows, s.part, false);
  x.entry = (score_input_bytes(scores_of_entry(s), x.rows, s.part, false) + 127) / 128 * 128;
  SharedPlan plan;
  plan.take(s.stages, x.unit);
  x.tile_at = plan.take(s.planes * x.parts, x.tile);
  x.entry_at = plan.take(s.entries * x.parts, x.entry);
  x.vectors_at = plan.take(x.vector_buffers, x.vectors);
  x.barriers_at = plan.barriers(2 * (s.stages + s.planes + s.entries + kBiasTileNumbers));
  x.numbers_at = plan.take(kBiasTileNumbers, 4);
  x.bytes = plan.bytes;
  return x;
}

// Beside Args. Tiles are numbered along the keys, then along the queries, planes, chunks of the list; under a band or
// where lengths differ along the planes first.
struct Sm90BiasGradientArgs {
  TensorMap q, k, v, grad_out;
  Has has_q, has_k, has_v, has_grad_out;
  math::u32* flags = nullptr;  // a word a tile and warp; with Spec::bias_outside written, else: tiles that are computed
  math::u32* ticket = nullptr;  // blocks take tiles from it; none: every gridDim.x-th
  int tiles = 0;
  int planes = 0;
  int group = 1;            // query heads of a key head
  bool waits_first = true;  // for the kernel before, whose results are read
  math::SmallCap<float> small_cap{};
};

}  // namespace fovea::cuda
