// SPDX-License-Identifier: Apache-2.0
//
// sm90_schedule: what sm90_forward takes its tiles from. One block: counters are cleared; where sequences have
// lengths of their own, their row tiles are listed, sequences with many keys first, so that what is left at the end is
// short.
//
//     count row tiles by class of length | add up the classes, the longest first | every sequence takes its place
//
// Classes are halves of powers of two. Which of a class comes first is left to chance: no result depends on it.
#pragma once

#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/forward_sizes.h"

namespace fovea::cuda {

template <AroundSpec S>
__global__ void __launch_bounds__(kSm90ScheduleThreads)
    sm90_schedule(const __grid_constant__ Args a, const __grid_constant__ Sm90ScheduleArgs to) {
  constexpr int kRows = sm90_forward_rows(S.warps);
  constexpr int kClasses = 64;
  constexpr int kFew = 8;          // row tiles that a thread writes by itself
  constexpr int kLongMost = 1024;  // longer sequences, which the block writes together
  __shared__ int places[kClasses];
  __shared__ ListedTile longs[kLongMost];
  __shared__ int long_count;
  const int thread = threadIdx.x;
  begin_kernel<S.arch>();
  if (thread == 0) {
    to.schedule->next = 0;
    long_count = 0;
  }
  for (int i = thread; i < to.count; i += kSm90ScheduleThreads) {
    to.joined[i] = 0;
  }
  if constexpr (S.ragged) {
    if (thread < kClasses) {
      places[thread] = 0;
    }
    sync();
    const int batch = int(a.rows.batch());
    const auto list = [&](const ListedTile& tile, int i) {
      if (u32(tile.first + i) < u32(to.room)) {
        to.list[tile.first + i] = tile;
      }
    };
    // 0: 2^31 keys and more, ..., 63: none.
    const auto class_of = [](const math::Sequence& sequence) {
      const u32 keys = u32(sequence.k_len);
      const int zeros = __clz(keys);
      return keys < 2 ? kClasses - 1 - int(keys) : 2 * zeros + int(1 - (keys >> (30 - zeros) & 1));
    };
    const auto row_tiles = [](const math::Sequence& sequence) { return (int(sequence.q_len) + kRows - 1) / kRows; };
    for (int b = thread; b < batch; b += kSm90ScheduleThreads) {
      const math::Sequence sequence = a.rows.sequence(b);
      atomicAdd(&places[class_of(sequence)], row_tiles(sequence));
    }
    sync();
    if (thread == 0) {
      int all = 0;
      for (int i = 0; i < kClasses; ++i) {
        const int own = places[i];
        places[i] = all;
        all += own;
      }
      to.schedule->row_tiles = min(all, to.room);
    }
    sync();
    for (int b = thread; b < batch; b += kSm90ScheduleThreads) {
      const math::Sequence sequence = a.rows.sequence(b);
      const int count = row_tiles(sequence);
      const ListedTile listed{b,
                              atomicAdd(&places[class_of(sequence)], count),
                              int(sequence.q_begin),
                              int(sequence.q_len),
                              int(sequence.k_begin),
                              int(sequence.k_len)};
      int later = kLongMost;
      if (count > kFew) {
        later = atomicAdd(&long_count, 1);
      }
      if (later < kLongMost) {
        longs[later] = listed;
      } else {
        for (int i = 0; i < count; ++i) {
          list(listed, i);
        }
      }
    }
    sync();
    for (int n = 0; n < min(long_count, kLongMost); ++n) {
      const int count = (longs[n].q_len + kRows - 1) / kRows;
      for (int i = thread; i < count; i += kSm90ScheduleThreads) {
        list(longs[n], i);
      }
    }
  }
}

}  // namespace fovea::cuda
