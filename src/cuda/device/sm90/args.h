// SPDX-License-Identifier: Apache-2.0
//
// What sm90_forward and sm90_schedule are called with beside Args: tensor maps, which the other kernels for Hopper
// have, too, and the order in which tiles are computed. Read by the host and, without any header, by NVRTC.
#pragma once

#include "math/rows.h"
#include "math/small_cap.h"

namespace fovea::cuda {

// As the driver encodes it.
struct alignas(64) TensorMap {
  math::u64 words[16];
};

// 1 for a dimension that a tensor has, 0 for one that it is broadcast over: what coordinates are multiplied by.
struct Has {
  int head = 1;
  int batch2 = 1;
  int batch1 = 1;
};

// A row tile's sequence: where its rows lie, and the first of its own row tiles in the list.
struct ListedTile {
  int b, first;
  int q_begin, q_len, k_begin, k_len;
};

// In the workspace, made by sm90_schedule: the next tile, and how many row tiles there are where lengths differ.
struct Schedule {
  math::u32 next;
  int row_tiles;
};

struct Sm90ScheduleArgs {
  Schedule* schedule = nullptr;
  ListedTile* list = nullptr;
  int room = 0;  // of the list: lengths that lie may have more tiles
  math::u32* joined = nullptr;
  int count = 0;  // of `joined`
};

struct Sm90ForwardArgs {
  TensorMap q, k, v, out, bias, bias2;
  Has has_q, has_k, has_v, has_out, has_bias, has_bias2;
  Schedule* schedule = nullptr;      // null: a block has one tile, or finds the next by itself
  const ListedTile* list = nullptr;  // with Spec::ragged
  int tiles = 0;                     // otherwise; split, joins: each part by itself
  int batch = 1;                     // of Rows
  int batch2 = 1;
  int heads = 1;
  int group = 1;              // query heads of a key head
  int row_tiles = 0;          // of a head
  int heads_together = 1;     // heads whose tiles alternate, so that K and V (or a bias) are read from L2
  bool batch_inside = false;  // heads run slower than batch entries
  int inside = 1;             // how many there are of what runs faster
  bool store_tensor = false;  // out may be written by its tensor map
  int low = 0;                // the band where queries and keys are as many (math::Band)
  int high = 0;
  float scale_of_cap = 0;  // scale / softcap
  math::SmallCap<float> small_cap{};
  float scale_log2 = 1;         // scale * log2(e)
  int whole = 0;                // split, joins: the tile from which on they have parts
  math::u32* joined = nullptr;  // joins: for a warp's rows how many parts have left their results
};

}  // namespace fovea::cuda
