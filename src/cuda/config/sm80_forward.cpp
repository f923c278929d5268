// SPDX-License-Identifier: Apache-2.0
//
// Tile sizes of the generic forward. The figures were found by measuring on an H200 (bench/results); what a device has
// not the shared memory for goes to the next candidate.
#include "cuda/config/sm80_forward.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "cuda/device/generic/sizes.h"

namespace fovea::cuda {
namespace {

struct Tiles {
  int warps;
  int tiles;
  int step;
  int ctas;
  bool resident = false;
  bool lazy = false;
  bool early = false;
};

std::vector<Tiles> candidates(const Spec& spec) {
  const int widest = std::max(spec.d, spec.dv);
  const bool bias = spec.bias != BiasTile::kNone || spec.bias2 != BiasTile::kNone;
  const bool dropout = spec.dropout != DropoutRule::kNone;
  if (spec.type == Type::kFp32) {
    if (widest <= 64) {
      return {{4, 1, 64, 2}, {4, 1, 32, 2}, {4, 1, 32, 1}};
    }
    // A bias takes the registers of half of the keys.
    const Tiles narrow{4, 1, 16, 1};
    return bias ? std::vector<Tiles>{narrow} : std::vector<Tiles>{{4, 1, 32, 1}, narrow};
  }
  if (widest <= 32) {
    // Three blocks a multiprocessor leave 168 registers a thread: Q stays in them where nothing else is done.
    if (dropout) {
      return {{4, 2, 64, 2, true}, {4, 2, 32, 2, true}, {4, 1, 32, 1}};
    }
    const bool plain = !bias && !natural_scores(spec) && !spec.mask && !spec.key_term && !spec.ragged;
    return {{4, 2, 64, 3, plain}, {4, 2, 64, 2, true}, {4, 2, 32, 2, true}, {4, 1, 32, 1}};
  }
  if (widest <= 64) {
    // Words made early and a lazy maximum overlap better with the products where there is dropout; masks take the time
    // that a maximum at every step would.
    const bool lazy = dropout || spec.mask || spec.key_mask;
    return {{4, 2, 64, 2, true, lazy, dropout}, {4, 2, 32, 2, true, lazy, dropout}, {4, 2, 32, 1}, {4, 1, 32, 1}};
  }
  if (widest <= 128) {
    const bool lazy = !(bias && spec.dropout == DropoutRule::kTorchMemEfficient);  // both leave no registers for it
    const Tiles narrow{4, 2, 32, 2, false, lazy};
    if (bias || spec.dropout == DropoutRule::kTorchMemEfficient) {
      return {narrow, {4, 2, 32, 1, false, true}, {4, 1, 32, 1, false, true}, {4, 1, 16, 1, false, true}};
    }
    return {{4, 2, 64, 2, false, true, dropout}, narrow, {4, 2, 32, 1, false, true}, {4, 1, 32, 1, false, true}};
  }
  if (dropout) {  // which with 64 keys would spill hundreds of bytes
    return {{8, 1, 32, 1}, {4, 1, 32, 1}, {4, 1, 16, 1}};
  }
  return {{8, 1, 64, 1}, {8, 1, 32, 1}, {4, 1, 32, 1}, {4, 1, 16, 1}};
}

struct WideTiles {
  int warps;
  int step;
  int grid_s;
  int grid_o;
  int part;  // columns of q and k at a time
  int columns = 512;
};

std::vector<WideTiles> wide_candidates(const Spec& spec) {
  if (spec.type == Type::kFp32) {
    if (spec.d <= 256 && spec.dv <= 256) {
      return {{8, 32, 4, 2, 256, 256}, {8, 32, 4, 2, 64, 256}};
    }
    return {{8, 32, 4, 2, 128, 256}, {8, 32, 4, 2, 64, 256}};
  }
  if (spec.d <= 512) {
    return {{8, 64, 4, 2, 512}, {8, 32, 4, 2, 512}, {8, 32, 4, 2, 256}, {8, 32, 4, 2, 256, 256}};
  }
  return {{8, 64, 4, 2, 256}, {8, 32, 4, 2, 256}, {8, 32, 4, 2, 256, 256}};
}

// What both kernels are compiled for but their tiles.
Spec features_of(const Operands& operands, const Target& target) {
  Spec spec = operands.features;
  spec.arch = target.capability;
  for (const Term& term : operands.terms) {
    spec.key_mask = spec.key_mask || (term.to == Region::kKeyTerm && term.biases.empty());
  }
  return spec;
}

}  // namespace

Choice sm80_forward(const Call& call, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "generic/forward.cuh";
  kernel.name = "generic_forward";
  Spec& spec = kernel.spec;
  spec = features_of(operands, target);
  const int most = spec.type == Type::kFp32 ? 128 : 256;
  if (spec.d > most || spec.dv > most) {
    choice.why_not = "head_dim beyond what registers hold";
    return choice;
  }
  for (const Tiles& tiles : candidates(spec)) {
    spec.warps = tiles.warps;
    // Few queries: half of the rows would stand idle.
    spec.tiles = call.rows.limit_q <= tiles.warps * 16 ? 1 : tiles.tiles;
    spec.step = tiles.step;
    spec.ctas = tiles.ctas;
    spec.resident = tiles.resident;
    spec.lazy = tiles.lazy;
    spec.early = tiles.early;
    kernel.threads = spec.warps * 32;
    kernel.shared_bytes = forward_shared_bytes(spec);
    if (target.holds(kernel.shared_bytes, spec.ctas)) {
      return choice;
    }
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

Choice sm80_wide_forward(const Call&, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "generic/wide_forward.cuh";
  kernel.name = "generic_wide_forward";
  Spec& spec = kernel.spec;
  spec = features_of(operands, target);
  spec.tiles = 1;
  spec.stages = 1;
  spec.ctas = 1;
  for (const WideTiles& tiles : wide_candidates(spec)) {
    spec.warps = tiles.warps;
    spec.step = tiles.step;
    spec.grid_s = tiles.grid_s;
    spec.grid_o = tiles.grid_o;
    spec.part = tiles.part;
    spec.columns = tiles.columns;
    kernel.threads = spec.warps * 32;
    kernel.shared_bytes = wide_forward_shared_bytes(spec);
    if (target.holds(kernel.shared_bytes, spec.ctas)) {
      return choice;
    }
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

std::int64_t forward_blocks(const Call& call, const Kernel& kernel) {
  const Spec& spec = kernel.spec;
  const bool wide = std::string_view(kernel.name) == "generic_wide_forward";
  const std::int64_t rows = wide ? wide_forward_rows(spec) : forward_rows(spec);
  return (call.rows.limit_q + rows - 1) / rows * call.rows.batch() * call.rows.heads_q *
         (wide ? wide_forward_chunks(spec) : 1);
}

}  // namespace fovea::cuda
