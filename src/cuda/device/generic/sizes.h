// SPDX-License-Identifier: Apache-2.0
//
// What the generic kernels take for a Spec: rows and keys of a block, threads, bytes of shared memory. Asked by the
// planner on the host and by the kernels themselves, so that the two cannot disagree.
#pragma once

#include "cuda/device/generic/spec.h"

namespace fovea::cuda {

// Bytes of a number of q, k, v in shared memory: fp32 is a pair of fp16.
constexpr int element_bytes(Type type) { return type == Type::kFp32 ? 4 : 2; }

constexpr int bias_bytes(BiasTile bias) { return bias == BiasTile::kNone ? 0 : bias == BiasTile::kFp32 ? 4 : 2; }

// What the scores of a tile need beyond q and k: biases, mask words, and the vector along the columns, which are keys
// in S (forward) and queries in S transposed (ScoreInputs in score/inputs.cuh).
constexpr int score_input_bytes(const Features& s, int queries, int keys, bool transposed) {
  const int words = keys >= 32 ? keys / 32 : 1;
  const bool vector = transposed ? s.query_term : s.key_term;
  return queries * keys * (bias_bytes(s.bias) + bias_bytes(s.bias2)) + (s.mask ? queries * words * 4 : 0) +
         (vector ? (transposed ? queries : keys) * 4 : 0);
}

// Whether scores are in natural units; otherwise they stay dot products, and the exponent scales them.
constexpr bool natural_scores(const Features& s) {
  const bool key_bias = s.key_term && (!s.key_mask || s.mask);  // with both the mask of keys is bits
  return s.natural || s.softcap || bool(s.positions) || key_bias || s.query_term || s.bias != BiasTile::kNone ||
         s.bias2 != BiasTile::kNone;
}

// Whether a query may be kept from a key of its sequence, or from all of them: by what is added, or by a band.
constexpr bool inputs_may_hide(const Features& s) {
  return s.mask || s.key_term || s.query_term || s.bias != BiasTile::kNone || s.bias2 != BiasTile::kNone;
}
constexpr bool may_hide(const Features& s) { return s.banded || inputs_may_hide(s); }

// ---- generic_forward ----

constexpr int forward_rows(const ForwardSpec& s) { return s.warps * s.tiles * 16; }

// Q once, then K, V and what the scores need for each of two stages. O leaves through the place of Q.
constexpr int forward_shared_bytes(const ForwardSpec& s) {
  const int rows = forward_rows(s);
  const int widest = s.d > s.dv ? s.d : s.dv;
  const int stage = s.step * (s.d + s.dv) * element_bytes(s.type) + score_input_bytes(s, rows, s.step, false);
  return rows * widest * element_bytes(s.type) + 2 * stage;
}

// ---- generic_wide_forward ----
// Warps form two grids: for S, grid_s of them along the queries and the rest along the keys; for O, grid_o along the
// queries and the rest along the columns.

constexpr int wide_forward_rows(const WideForwardSpec& s) { return s.grid_s * 16; }

// Columns of q and k that lie in shared memory at a time.
constexpr int wide_forward_part(const WideForwardSpec& s) { return s.part < s.d ? s.part : s.d; }

// O in pieces of its columns, a block each.
constexpr int wide_forward_chunks(const WideForwardSpec& s) { return (s.dv + s.columns - 1) / s.columns; }
constexpr int wide_forward_columns(const WideForwardSpec& s) {
  const int grid = s.warps / s.grid_o * 16;
  const int chunks = wide_forward_chunks(s);
  return ((s.dv + chunks - 1) / chunks + grid - 1) / grid * grid;
}

// Q, K, V, P, what the scores need, maxima and factors of rows. O leaves through the beginning.
constexpr int wide_forward_shared_bytes(const WideForwardSpec& s) {
  const int rows = wide_forward_rows(s);
  const int element = element_bytes(s.type);
  const int part = wide_forward_part(s);
  const int loop = (rows + s.step) * part * element + s.step * wide_forward_columns(s) * element +
                   rows * s.step * element + score_input_bytes(s, rows, s.step, false) +
                   rows * (s.warps / s.grid_s + 1) * 4;
  const int out = rows * wide_forward_columns(s) * element + rows * (s.warps / s.grid_s + 1) * 4;
  return loop > out ? loop : out;
}

// ---- generic_combine: with Spec::split, after the forward ----

constexpr int kCombineRows = 4;  // rows of a block, a warp each; its grid is tiles of them by heads

}  // namespace fovea::cuda
