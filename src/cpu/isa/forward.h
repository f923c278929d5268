// SPDX-License-Identifier: Apache-2.0
//
// The forward of some rows (queries of a group of heads) against a range of keys:
//
//     for each block of keys:                        K^T and V of the block are packed once, in L2
//       for each strip of rows (as many as a product keeps in registers):
//         S  = Q K^T                                 a strip of S stays in L1
//         S  -> scores -> weights relative to the running maximum, sums kept a vector a row
//         O += P V                                   after scaling by the maximum's rise
//     out = O / sum,  lse = maximum + log(sum)
//
// A strip touches only the keys that its rows meet: inside an edge block of a causal or windowed problem the products
// follow the band. Rows of several heads share a strip, so that grouped heads with few queries fill it.
#pragma once

#include "cpu/isa/forward_operands.h"
#include "cpu/isa/forward_rows.h"
#include "cpu/isa/forward_state.h"
#include "cpu/isa/scores.h"

namespace fovea::cpu::FOVEA_ISA {

template <class Operands>
struct ForwardTiles {
  using T = typename Operands::Number;

  Operands operands;
  T* s;
  T* lse;
  u8* keep;
  i64 keep_stride;
  RowBuffers<T> buffers;

  ForwardTiles(Arena& arena, const Options& options)
      : operands(arena, options),
        s(arena.take<T>((Operands::kBeside ? 2 : 1) * Operands::kStrip * operands.ld_s)),
        lse(arena.take<T>(options.block_rows)),
        keep(
            arena.take<u8>(options.dropping == Dropping::kNone ? 0 : options.block_rows * bit_row(options.block_keys))),
        keep_stride(bit_row(options.block_keys)),
        buffers(arena, Operands::padded_keys(options.block_keys)) {}
};

// The query and, within the group, the head of a row.
struct RowPlace {
  i64 head, query;

  static RowPlace of(i64 row, i64 q_len) { return {row / q_len, row % q_len}; }
  // Divisions take tens of cycles: none within a head.
  RowPlace after(i64 rows, i64 q_len) const {
    const i64 later = query + rows;
    return later < q_len ? RowPlace{head, later} : RowPlace{head + later / q_len, later % q_len};
  }
};

// The keys that `rows` rows from `place` on meet, within [first, last).
HWY_INLINE math::Interval<i64> keys_of_strip(const SequenceArgs& sequence, RowPlace place, i64 rows, i64 first,
                                             i64 last) {
  const math::Band<i64> band = band_of(sequence);
  math::Interval<i64> keys{last, first};
  while (rows > 0) {
    const i64 some = math::min(rows, sequence.q_len - place.query);
    const math::Interval<i64> met = band.keys_of_rows(place.query, place.query + some);
    if (!met.empty()) {
      keys = {math::min(keys.begin, met.begin), math::max(keys.end, met.end)};
    }
    place = {place.head + 1, 0};
    rows -= some;
  }
  return {math::max(keys.begin, first), math::min(keys.end, last)};
}

// One row of a strip: scores to weights, with what came before scaled to the new maximum. Calls between() on the way.
template <class Weight, class T, class Between>
HWY_INLINE void soften_row(const math::Score<T>& score, const RowTerms<T>& terms, const u8* keep, i64 cols, T* s,
                           T& running_max, T* running_sum, T* o, i64 value_cols, Between between) {
  const T before = running_max;
  const T after = math::max(score_row(score, terms, cols, s), before);
  between();
  Simd<T> before_sum = Simd<T>::load(running_sum);
  if (after != before && before == T(-kInfinity)) {
    running_max = after;  // nothing was summed yet
  } else if (after != before) {
    const Simd<T> factor = math::correction(Simd<T>(before), Simd<T>(after));
    before_sum = before_sum * factor;
    for (i64 c = 0; c < value_cols; c += lanes<T>()) {
      (Simd<T>::load(o + c) * factor).store(o + c);
    }
    running_max = after;
  }
  const Simd<T> sum = weigh_row(math::reference_of(after), keep, cols, s, reinterpret_cast<Weight*>(s));
  (before_sum + sum).store(running_sum);  // a block's own sum first, so that few terms are added to a large one
}

// Rows that go through the products together, and the keys that they meet: columns [col, col + depth) of a block.
template <class T>
struct Strip {
  RowPlace place;  // of its first row
  i64 row, rows;
  i64 col, depth, cols;  // cols: depth as products round it up; 0: no keys
  T* s;
};

template <class Operands, class T>
void forward_block(const ForwardTask& task, const ForwardTiles<Operands>& tiles, const ForwardState<T>& state,
                   typename Operands::Unit& unit, i64 key, i64 key_end, i64 key_last) {
  const Operands& operands = tiles.operands;
  const Options& options = *task.options;
  const SequenceArgs& sequence = task.sequence;
  const i64 rows = task.row_end - task.row_begin;
  const i64 value_cols = padded<T>(options.head_dim_v);
  const math::Score<T> score = math::Score<T>::make(options.scale, options.softcap);
  const bool drops = options.dropping != Dropping::kNone;

  operands.load_keys(unit, task, key, key_end - key);
  if (drops) {
    for_each_head(task, [&](const ForwardHead& head, i64 begin, i64 end, i64 first) {
      keep_bits(options, head.head, begin, end - begin, key, key_end - key, tiles.keep + first * tiles.keep_stride,
                tiles.keep_stride);
    });
  }

  // The first strip from `row` on that meets keys.
  const auto strip_from = [&](i64 row, T* s) {
    for (; row < rows; row += Operands::kStrip) {
      const i64 strip = math::min(Operands::kStrip, rows - row);
      const RowPlace place = RowPlace::of(task.row_begin + row, sequence.q_len);
      const math::Interval<i64> keys = keys_of_strip(sequence, place, strip, key, key_end);
      if (!keys.empty()) {
        const i64 col = (keys.begin - key) / Operands::kKeyStep * Operands::kKeyStep;
        const i64 depth = keys.end - key - col;
        return Strip<T>{place, row, strip, col, depth, Operands::padded_keys(depth), s};
      }
    }
    return Strip<T>{{}, rows, 0, 0, 0, 0, s};
  };
  i64 next_key = key_end;
  const auto soften = [&](const Strip<T>& strip, i64 r, auto between) {
    const i64 row = strip.row + r;
    const RowPlace place = strip.place.after(r, sequence.q_len);
    const ForwardHead& head = task.heads[place.head];
    if (row + Operands::kStrip < rows) {
      const RowPlace later = place.after(Operands::kStrip, sequence.q_len);
      prefetch_terms(task.heads[later.head].head, later.query, key + strip.col,
                     math::min(strip.cols, sequence.k_len - key - strip.col));
    }
    if (Operands::kPacks && key_end < key_last) {
      for (const i64 end = key_end + (key_last - key_end) * (row + 1) / rows; next_key < end; ++next_key) {
        prefetch_row<2>(task.k, next_key, 0, options.head_dim);
        prefetch_row<2>(task.v, next_key, 0, options.head_dim_v);
      }
    } else if (Operands::kPacks) {  // the last block: soon the row is stored
      prefetch_row(head.out, place.query, 0, options.head_dim_v, true);
    }
    const RowTerms<T> terms =
        terms_of_row(head.head, sequence, place.query, key + strip.col, strip.cols, tiles.buffers);
    const u8* keep = drops ? tiles.keep + row * tiles.keep_stride + strip.col / 8 : nullptr;
    soften_row<typename Operands::Weight>(score, terms, keep, strip.cols, strip.s + r * operands.ld_s, state.max[row],
                                          state.sum + row * lanes<T>(), state.o + row * operands.ld_v, value_cols,
                                          between);
  };
  Strip<T> strip = strip_from(0, tiles.s);
  if constexpr (!Operands::kBeside) {
    for (; strip.cols > 0; strip = strip_from(strip.row + Operands::kStrip, tiles.s)) {
      operands.scores(unit, options, strip.row, strip.rows, strip.col, strip.cols, strip.s);
      for (i64 r = 0; r < strip.rows; ++r) {
        soften(strip, r, [] {});
      }
      operands.add_values(unit, options, strip.rows, strip.col, strip.depth, strip.s,
                          state.o + strip.row * operands.ld_v);
    }
  } else {
    // The unit works beside the vectors, a few hundred instructions ahead or behind: twice a row there are some steps
    // of the products of the strips before and after it.
    using Steps = typename Operands::Steps;
    const auto scores_of = [&](const Strip<T>& some) {
      return Steps(operands.scores(options, some.row, some.rows, some.col, some.cols, some.s));
    };
    const auto values_of = [&](const Strip<T>& some) {
      return Steps(
          operands.values(options, some.rows, some.col, some.depth, some.s, state.o + some.row * operands.ld_v));
    };
    T* const buffers[2] = {tiles.s, tiles.s + Operands::kStrip * operands.ld_s};
    Steps values;
    if (strip.cols > 0) {
      Steps first = scores_of(strip);
      first.finish(unit);
    }
    for (i64 number = 0; strip.cols > 0; ++number) {
      const Strip<T> next = strip_from(strip.row + Operands::kStrip, buffers[(number + 1) % 2]);
      Steps scores = next.cols > 0 ? scores_of(next) : Steps();
      const i64 steps = values.count() + scores.count();
      i64 places = 0;
      i64 done = 0;
      const auto between = [&] {
        ++places;
        const i64 due = steps * places / (2 * strip.rows) - done;
        const i64 of_values = values.advance(unit, due);
        scores.advance(unit, due - of_values);
        done += due;
      };
      for (i64 r = 0; r < strip.rows; ++r) {
        soften(strip, r, between);
        between();
      }
      values = values_of(strip);
      strip = next;
    }
    values.finish(unit);
  }
}

template <class Operands>
size_t scratch_of_forward(const Options& options) {
  Arena arena(nullptr);
  const ForwardState<typename Operands::Number> state(arena, options);
  const ForwardTiles<Operands> tiles(arena, options);
  return arena.used();
}

template <class Operands>
void forward(const ForwardTask& task, void* scratch) {
  using T = typename Operands::Number;
  const Options& options = *task.options;
  Arena arena(scratch);
  Arena partial(task.partial);
  const ForwardState<T> state(task.partial != nullptr ? partial : arena, options);
  const ForwardTiles<Operands> tiles(arena, options);
  const Operands& operands = tiles.operands;
  typename Operands::Unit unit;
  const i64 rows = task.row_end - task.row_begin;
  const math::Band<i64> band = band_of(task.sequence);

  math::Interval<i64> keys{task.key_end, task.key_begin};
  for_each_head(task, [&](const ForwardHead& head, i64 begin, i64 end, i64 first) {
    operands.load_queries(unit, task, head.head.q, begin, end, first);
    const T sink = task.first_keys ? static_cast<T>(head.sink) : T(-kInfinity);
    for (i64 row = first; row < first + end - begin; ++row) {
      state.max[row] = sink;
      const T sum = math::sum_with_sink(T(0), math::reference_of(sink), sink);
      Simd<T>(T(0)).store(state.sum + row * lanes<T>());
      state.sum[row * lanes<T>()] = sum;
    }
    const math::Interval<i64> met = band.keys_of_rows(begin, end);
    keys = {math::min(keys.begin, math::max(met.begin, task.key_begin)),
            math::max(keys.end, math::min(met.end, task.key_end))};
  });
  fill(state.o, round_up(rows, Operands::kRowStep) * operands.ld_v, T(0));
  // Products of strips round their keys up. What they read there are the keys that follow, not zeros where this task's
  // rows end: 0 times an infinity is NaN, whatever rows are with it.
  if (!keys.empty()) {
    keys.end = math::min(round_up(keys.end, Operands::kKeyStep), task.key_end);
  }

  // Blocks end where they end for every task, so that a row has the same bits whatever rows are with it. Without keys
  // (a part behind the end of a short sequence), rounding down would begin with another part's.
  const i64 first_key = keys.empty() ? keys.end : keys.begin / Operands::kKeyStep * Operands::kKeyStep;
  for (i64 key = first_key, end; key < keys.end; key = end) {
    end = math::min((key / options.block_keys + 1) * options.block_keys, keys.end);
    forward_block(task, tiles, state, unit, key, end, math::min(end + options.block_keys, keys.end));
  }
  if (task.partial == nullptr) {
    finish_rows(task, state, tiles.lse);
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
