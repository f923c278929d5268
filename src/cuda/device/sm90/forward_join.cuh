// SPDX-License-Identifier: Apache-2.0
//
// Tiles of queries whose keys several blocks have in parts (Sm90ForwardTiles::joins): each part leaves O as it is,
// its references and sums, in fp32. Whichever part of 16 queries ends last puts all of them together, in the order of
// the parts, so that results have the same bits every time.
#pragma once

#include "cuda/device/score/sm90_softmax.cuh"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/pipe.cuh"

namespace fovea::cuda {

// A warp's 16 rows. number: of the part among all parts; warp: among those that compute, of both blocks of a pair.
// True: these are the rows of all parts.
template <auto S>
__device__ __forceinline__ bool sm90_forward_join(const Args& a, const Sm90ForwardArgs& m, int number,
                                                  Sm90Softmax<S>& softmax, float (&o)[S.dv / 2], int warp, int lane) {
  if (!S.joins || number < 0) {
    return true;
  }
  const int tile = int(u32(number) / u32(a.splits));
  const auto piece = [&](int of) { return i64(of) * (S.warps * sm90_forward_blocks(S)) + warp; };
  const auto out = [&](int of) { return a.partial_out + piece(of) * (16 * S.dv) + lane * 4; };
  const auto ends = [&](int of) { return a.partial_sum + piece(of) * 128 + lane * 4; };  // of this lane's rows
  store_fragments(out(number), o);
  const float own[4] = {softmax.reference[0], softmax.reference[1], softmax.sum[0], softmax.sum[1]};
  store_fragments(ends(number), own);
  if (!comes_last(m.joined + piece(tile), a.splits, lane)) {
    return false;
  }
  const int first = tile * a.splits;
  float top[2] = {-kInfinity, -kInfinity};
#pragma unroll 1
  for (int part = 0; part < a.splits; ++part) {
    const float4 end = load_summed(ends(first + part));
    top[0] = fmaxf(top[0], end.x);
    top[1] = fmaxf(top[1], end.y);
  }
  set_zero(o);
  set_zero(softmax.sum);
#pragma unroll 1
  for (int part = 0; part < a.splits; ++part) {
    const float4 end = load_summed(ends(first + part));
    const float factor[2] = {softmax.factor_of_part(end.x, end.z, top[0]),
                             softmax.factor_of_part(end.y, end.w, top[1])};
    softmax.sum[0] += end.z * factor[0];
    softmax.sum[1] += end.w * factor[1];
    const float* const from = out(first + part);
#pragma unroll
    for (int j = 0; j < S.dv / 8; ++j) {
      const float4 x = load_summed(from + j * 128);
      o[4 * j] += x.x * factor[0];
      o[4 * j + 1] += x.y * factor[0];
      o[4 * j + 2] += x.z * factor[1];
      o[4 * j + 3] += x.w * factor[1];
    }
  }
  softmax.reference[0] = top[0];
  softmax.reference[1] = top[1];
  return true;
}

}  // namespace fovea::cuda
