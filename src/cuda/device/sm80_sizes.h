// SPDX-License-Identifier: Apache-2.0
//
// What the generic kernels take for a Spec: rows and keys of a block, threads, bytes of shared memory. Asked by the
// planner on the host and by the kernels themselves, so that the two cannot disagree.
#ifndef FOVEA_CUDA_DEVICE_SM80_SIZES_H
#define FOVEA_CUDA_DEVICE_SM80_SIZES_H

#include "spec.h"

namespace fovea::cuda {

// Bytes of a number of q, k, v in shared memory: fp32 is a pair of fp16.
constexpr int element_bytes(Type type) { return type == Type::kFp32 ? 4 : 2; }

constexpr int bias_bytes(BiasTile bias) { return bias == BiasTile::kNone ? 0 : bias == BiasTile::kFp32 ? 4 : 2; }

// What the scores of a tile need beyond q and k: biases, mask words, and the vector along the columns, which are keys
// in S (forward) and queries in S transposed (ScoreInputs in scores.cuh).
constexpr int score_input_bytes(const Spec& s, int queries, int keys, bool transposed) {
  const int words = keys >= 32 ? keys / 32 : 1;
  const bool vector = transposed ? s.query_term : s.key_term;
  return queries * keys * (bias_bytes(s.bias) + bias_bytes(s.bias2)) + (s.mask ? queries * words * 4 : 0) +
         (vector ? (transposed ? queries : keys) * 4 : 0);
}

// ---- sm80_forward ----

constexpr int forward_rows(const Spec& s) { return s.warps * s.tiles * 16; }

// Q once, then K, V and what the scores need for each stage. O leaves through the place of Q.
constexpr int forward_shared_bytes(const Spec& s) {
  const int rows = forward_rows(s);
  const int widest = s.d > s.dv ? s.d : s.dv;
  const int stage = s.step * (s.d + s.dv) * element_bytes(s.type) + score_input_bytes(s, rows, s.step, false);
  return rows * widest * element_bytes(s.type) + s.stages * stage;
}

// ---- sm80_combine: with Spec::split, after the forward ----

constexpr int kCombineRows = 4;  // rows of a block, a warp each; its grid is tiles of them by heads

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM80_SIZES_H
