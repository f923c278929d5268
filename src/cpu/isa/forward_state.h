// SPDX-License-Identifier: Apache-2.0
//
// The sums of some rows of the forward, and how they become results: the parts of a row whose keys were split are
// merged, and finished rows are divided by their sums, merged with a result that is there, rounded and stored.
#pragma once

#include "cpu/isa/tile.h"
#include "math/merge.h"
#include "math/softmax.h"

namespace fovea::cpu::FOVEA_ISA {

// What one task computes on. It is also what a part of a split row leaves for forward_merge.
template <class T>
struct ForwardState {
  T* o;    // rows of the unfinished output
  T* max;  // the running maximum, by row
  T* sum;  // weights relative to it, a vector a row

  ForwardState(Arena& arena, const Options& options)
      : o(arena.take<T>(round_up(options.block_rows, 32) * leading<T>(options.head_dim_v))),
        max(arena.take<T>(options.block_rows)),
        sum(arena.take<T>(options.block_rows * lanes<T>())) {}
};

template <class T>
size_t forward_partial(const Options& options) {
  Arena arena(nullptr);
  const ForwardState<T> state(arena, options);
  return arena.used();
}

// Calls visit(head, first query, end, number of its first row within the task) for each head that the rows touch.
template <class Task, class Visit>
HWY_INLINE void for_each_head(const Task& task, Visit visit) {
  const i64 q_len = task.sequence.q_len;
  for (i64 row = task.row_begin; row < task.row_end;) {
    const i64 head = row / q_len;
    const i64 end = math::min(task.row_end, (head + 1) * q_len);
    visit(task.heads[head], row - head * q_len, end - head * q_len, row - task.row_begin);
    row = end;
  }
}

// A finished row becomes what is to be stored over the result that is there. Returns the new logsumexp.
template <class T>
T merge_row(const ForwardHead& head, i64 i, i64 cols, T lse, T* o) {
  T before = 0;
  load_row(head.lse, 0, i, 1, &before);
  const math::Merge<T> merged = math::merge(before, lse);
  T chunk[kChunk];
  for (i64 c = 0; c < cols; c += kChunk) {
    const i64 some = math::min(kChunk, cols - c);
    load_row(head.out, i, c, some, chunk);
    for (i64 n = 0; n < some; ++n) {
      o[c + n] = o[c + n] * merged.of_new + chunk[n] * merged.of_old;
    }
  }
  return merged.lse;
}

// Divides by the sums, rounds and stores.
template <class T, class Task>
void finish_rows(const Task& task, const ForwardState<T>& state, T* lse) {
  const Options& options = *task.options;
  const i64 ld = leading<T>(options.head_dim_v);
  for_each_head(task, [&](const ForwardHead& head, i64 begin, i64 end, i64 first) {
    for (i64 i = begin; i < end; ++i) {
      const i64 row = first + i - begin;
      const T sum = sum_of_lanes(Simd<T>::load(state.sum + row * lanes<T>()));
      const Simd<T> factor(math::inverse_of_sum(sum) * static_cast<T>(options.keep_factor));
      T* o = state.o + row * ld;
      Matrix out = head.out;
      const bool in_place =
          out.type == native_type<T>() && out.col == 1 && !out.add && options.head_dim_v % lanes<T>() == 0;
      T* to = in_place ? reinterpret_cast<T*>(address(out, i, 0)) : o;
      for (i64 c = 0; c < options.head_dim_v; c += lanes<T>()) {
        (Simd<T>::load(o + c) * factor).store(to + c);
      }
      if (head.lse.type != 0 || out.add) {
        lse[i - begin] = math::logsumexp(math::reference_of(state.max[row]), sum);
      }
      if (in_place) {
        continue;
      }
      if (out.add) {
        lse[i - begin] = merge_row(head, i, options.head_dim_v, lse[i - begin], o);
        out.add = false;
      }
      store_row(o, out, i, 0, options.head_dim_v);
    }
    if (head.lse.type != 0) {
      store_row(lse, head.lse, 0, begin, end - begin);
    }
  });
}

// The parts of each row in their order, relative to the largest maximum.
template <class T>
void forward_merge(const MergeTask& task, void* scratch) {
  const Options& options = *task.options;
  const i64 rows = task.row_end - task.row_begin;
  const i64 ld = leading<T>(options.head_dim_v);
  const i64 value_cols = padded<T>(options.head_dim_v);
  Arena arena(scratch);
  const ForwardState<T> state(arena, options);
  T* lse = arena.take<T>(options.block_rows);
  const auto state_of = [&](i64 part) {
    Arena memory(static_cast<u8*>(const_cast<void*>(task.partials)) + part * i64(task.partial_bytes));
    return ForwardState<T>(memory, options);
  };
  for (i64 row = 0; row < rows; ++row) {
    T largest = T(-kInfinity);
    for (i64 part = 0; part < task.parts; ++part) {
      largest = math::max(largest, state_of(part).max[row]);
    }
    Simd<T> sum(T(0));
    fill(state.o + row * ld, value_cols, T(0));
    for (i64 part = 0; part < task.parts; ++part) {
      const ForwardState<T> one = state_of(part);
      const Simd<T> factor = math::correction(Simd<T>(one.max[row]), Simd<T>(largest));
      sum = fma(Simd<T>::load(one.sum + row * lanes<T>()), factor, sum);
      for (i64 c = row * ld; c < row * ld + value_cols; c += lanes<T>()) {
        fma(Simd<T>::load(one.o + c), factor, Simd<T>::load(state.o + c)).store(state.o + c);
      }
    }
    state.max[row] = largest;
    sum.store(state.sum + row * lanes<T>());
  }
  finish_rows(task, state, lse);
}

}  // namespace fovea::cpu::FOVEA_ISA
