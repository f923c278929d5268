// SPDX-License-Identifier: Apache-2.0
//
// The backward of one block of keys: it computes dk and dv of its keys and loops over the blocks of queries that meet
// them, for every head of the group. Five products a tile, P computed once:
//
//     S  = Q K^T      dP = dO V^T        strip by strip; then p and ds row by row, in L1
//     dV += P^T dO    dK += dS^T Q       sums of this block, in L2
//     dQ  = dS K                         a tile, added to the sum of its queries
//
// Sums to which other tasks add too (dq; a broadcast bias's gradient; dk and dv where the walk is split) have an order:
// contributions to a tile are numbered 0, 1, 2, ..., and number n waits until the tile's counter is n. Numbers grow
// with the tickets under which tasks are taken, so a task waits for running tasks only, and all walk in the same
// direction, like a pipeline. The result has the same bits for any number of threads. Products come before the wait.
#pragma once

#include "cpu/isa/backward_operands.h"
#include "cpu/isa/scores.h"

namespace fovea::cpu::FOVEA_ISA {

template <class Operands>
struct BackwardTiles {
  using T = typename Operands::Number;

  Operands operands;
  T* ds_bias;
  T* dq;
  T* sums_by_key;  // of ds, for a bias that is broadcast over queries
  u8* keep;
  i64 keep_stride;
  RowBuffers<T> buffers;

  BackwardTiles(Arena& arena, const Options& options)
      : operands(arena, options),
        ds_bias(arena.take<T>(options.need_bias ? all_rows(options) * operands.ld_s : 0)),
        dq(arena.take<T>(all_rows(options) * operands.ld_q)),
        sums_by_key(arena.take<T>(2 * operands.ld_s)),
        keep(
            arena.take<u8>(options.dropping == Dropping::kNone ? 0 : options.block_rows * bit_row(options.block_keys))),
        keep_stride(bit_row(options.block_keys)),
        buffers(arena, Operands::padded_keys(options.block_keys)) {}

  static i64 all_rows(const Options& options) { return round_up(options.block_rows, Operands::kRowStep); }
};

// Zeros wherever columns [begin, end) of a row leave off.
template <class T>
HWY_INLINE void clear_outside(T* row, i64 begin, i64 end, i64 cols) {
  fill(row, begin, T(0));
  fill(row + end, math::max(cols - end, i64(0)), T(0));
}

// to = a + b; only `count` elements are touched.
template <class T>
void add(const T* a, const T* b, i64 count, T* to) {
  i64 n = 0;
  for (; n + lanes<T>() <= count; n += lanes<T>()) {
    (Simd<T>::load(a + n) + Simd<T>::load(b + n)).store(to + n);
  }
  for (; n < count; ++n) {
    to[n] = a[n] + b[n];
  }
}

// One task's view of its tile: query block by key block.
template <class Operands>
struct Tile {
  using T = typename Operands::Number;

  const BackwardTask& task;
  const BackwardHead& head;
  const BackwardTiles<Operands>& tiles;
  typename Operands::Unit& unit;
  math::Band<i64> band;
  i64 key, key_end;  // keys
  i64 row, row_end;  // queries

  const Options& options() const { return *task.options; }
  i64 keys() const { return key_end - key; }
  i64 rows() const { return row_end - row; }
  bool needs_ds() const { return options().need_q || options().need_k || options().need_bias; }

  void load() const {
    const Options& o = options();
    tiles.operands.load_queries(head, o, row, rows(), static_cast<const T*>(head.reference) + row);
    if (o.dropping != Dropping::kNone) {
      keep_bits(o, head.head, row, rows(), key, keys(), tiles.keep, tiles.keep_stride);
    }
  }

  // Where a row of dS is written for a bias, padded_keys(keys()) numbers: into its gradient if that is stored as it
  // comes, or a tile; or NULL.
  T* ds_bias_row(i64 i) const {
    if (!options().need_bias) {
      return nullptr;
    }
    const BiasGradient* direct = direct_bias();
    return direct != nullptr ? reinterpret_cast<T*>(address(direct->sum, i, key))
                             : tiles.ds_bias + (i - row) * tiles.operands.ld_s;
  }

  const BiasGradient* direct_bias() const {
    for (int n = 0; n < 2; ++n) {
      const BiasGradient& bias = head.bias[n];
      if (bias.how == BiasSum::kStore && head.bias[1 - n].how == BiasSum::kNone && bias.sum.col == 1 &&
          bias.sum.type == native_type<T>() && !bias.sum.add && keys() == Operands::padded_keys(keys())) {
        return &bias;
      }
    }
    return nullptr;
  }

  // What adds to a row of the strip to come.
  HWY_INLINE void prefetch(i64 i) const {
    if (i < row_end) {
      prefetch_terms(head.head, i, key, keys());
    }
  }

  // What the rest of this tile and the next one read of far memory, while a row is computed: into the second level.
  HWY_INLINE void prefetch_ahead(i64 i) const {
    if (options().need_q && task.key_block > 0) {
      prefetch_row<2>(Matrix{head.sum_q, native_type<T>(), head.sum_q_stride, 1, false}, i, 0, options().head_dim);
    }
    if (const i64 next = i + options().block_rows; next < task.sequence.q_len) {
      prefetch_row<2>(head.head.q, next, 0, options().head_dim);
      prefetch_row<2>(head.grad_out, next, 0, options().head_dim_v);
    }
  }

  // P and dS of the whole tile, zeros where nothing is computed.
  void scores() const {
    const Options& o = options();
    const math::Score<T> score = math::Score<T>::make(o.scale, o.softcap);
    const T* reference = static_cast<const T*>(head.reference);
    const T* delta = static_cast<const T*>(head.delta);
    const Operands& operands = tiles.operands;
    const i64 all_cols = Operands::padded_keys(keys());
    const bool streams = direct_bias() != nullptr;
    for (i64 first = row; first < row_end; first += Operands::kStrip) {
      const i64 strip = math::min(Operands::kStrip, row_end - first);
      const math::Interval<i64> met = band.keys_of_rows(first, first + strip);
      const i64 begin = math::max(met.begin, key) - key;
      const i64 end = math::min(met.end, key_end) - key;
      const i64 col = begin < end ? begin / Operands::kKeyStep * Operands::kKeyStep : 0;
      const i64 cols = begin < end ? Operands::padded_keys(end - col) : 0;
      if (cols > 0) {
        operands.begin_strip(unit, o, first - row, strip, col, cols, needs_ds());
      }
      for (i64 r = 0; r < strip; ++r) {
        const i64 i = first + r;
        prefetch(i + Operands::kStrip);
        prefetch_ahead(i);
        T* p_row = operands.p_row(i - row);
        T* ds_row = needs_ds() ? operands.ds_row(i - row) : nullptr;
        T* ds_bias = ds_bias_row(i);
        if (cols > 0) {
          const RowTerms<T> terms = terms_of_row(head.head, task.sequence, i, key + col, cols, tiles.buffers);
          const u8* keep =
              o.dropping != Dropping::kNone ? tiles.keep + (i - row) * tiles.keep_stride + col / 8 : nullptr;
          grad_row(score, terms, cols,
                   GradRow<T>{reference[i], delta[i], keep, static_cast<T>(o.keep_factor), p_row + col,
                              ds_row != nullptr ? ds_row + col : nullptr, ds_bias != nullptr ? ds_bias + col : nullptr,
                              streams && is_aligned(ds_bias + col)});
        }
        clear_outside(p_row, col, col + cols, all_cols);
        if (ds_row != nullptr) {
          clear_outside(ds_row, col, col + cols, all_cols);
        }
        if (ds_bias != nullptr) {
          clear_outside(ds_bias, col, col + cols, all_cols);
        }
      }
      operands.end_strip(first - row, strip, all_cols, needs_ds());
    }
  }

  // dV += P^T dO and dK += dS^T Q, each strip of keys with the queries that meet it.
  void add_to_keys() const {
    for (i64 first = key; first < key_end; first += Operands::kStrip) {
      const i64 strip = math::min(Operands::kStrip, key_end - first);
      const math::Interval<i64> met = band.queries_of_keys(first, first + strip);
      const i64 begin = (math::max(met.begin, row) - row) / Operands::kDepthStep * Operands::kDepthStep;
      const i64 depth = math::min(met.end, row_end) - row - begin;
      if (depth > 0) {
        tiles.operands.add_to_keys(unit, options(), first - key, strip, begin, depth);
      }
    }
  }

  // dQ = dS K, added to the sum of these queries in the order of the key blocks; the last block rounds it.
  void add_to_queries(i64 block) const {
    const Options& o = options();
    for (i64 first = row; first < row_end; first += Operands::kStrip) {
      const i64 strip = math::min(Operands::kStrip, row_end - first);
      const math::Interval<i64> met = band.keys_of_rows(first, first + strip);
      const i64 begin = (math::max(met.begin, key) - key) / Operands::kDepthStep * Operands::kDepthStep;
      const i64 depth = math::max(math::min(met.end, key_end) - key - begin, i64(0));
      tiles.operands.form_dq(unit, o, first - row, strip, begin, depth, tiles.dq);
    }

    const math::Interval<i64> keys_met = band.keys_of_rows(row, row_end);
    const i64 first_block = keys_met.begin / o.block_keys;
    const i64 last_block = (keys_met.end - 1) / o.block_keys;
    const u32 number = static_cast<u32>(task.key_block - first_block);
    o.wait_for(head.turns_q + block, number);
    for (i64 i = row; i < row_end; ++i) {
      T* sum = static_cast<T*>(head.sum_q) + i * head.sum_q_stride;
      T* mine = tiles.dq + (i - row) * tiles.operands.ld_q;
      if (number > 0) {
        add(sum, mine, o.head_dim, mine);
      }
      if (task.key_block < last_block || head.sum_is_grad_q) {
        convert_out(mine, sum, o.head_dim);
      } else {
        store_row(mine, head.grad_q, i, 0, o.head_dim);
      }
    }
    __atomic_store_n(head.turns_q + block, number + 1, __ATOMIC_RELEASE);
  }

  // The gradient of one bias: this tile's ds, reduced over what the bias is broadcast over. `number` is its place
  // among the contributions to these queries.
  void add_to_bias(const BiasGradient& bias, i64 block, u32 number, T* sums_by_key) const {
    const T* ds = tiles.ds_bias;
    if (bias.over_queries) {
      for (i64 c = 0; c < padded<T>(keys()); c += lanes<T>()) {
        Simd<T> sum(T(0));
        for (i64 r = 0; r < rows(); ++r) {
          sum = sum + Simd<T>::load(ds + r * tiles.operands.ld_s + c);
        }
        (Simd<T>::load(sums_by_key + c) + sum).store(sums_by_key + c);
      }
      return;
    }
    if (&bias == direct_bias()) {
      return;
    }
    if (bias.how == BiasSum::kStore) {
      for (i64 r = 0; r < rows(); ++r) {
        store_row(ds + r * tiles.operands.ld_s, bias.sum, row + r, key, keys());
      }
      return;
    }
    std::uint32_t* turn = bias.turns + block;
    options().wait_for(turn, number);
    for (i64 r = 0; r < rows(); ++r) {
      if (bias.over_keys) {
        add_strided(bias.sum, row + r, 0, 1, sum_of_row(ds + r * tiles.operands.ld_s));
      } else {
        add_strided(bias.sum, row + r, key, keys(), ds + r * tiles.operands.ld_s);
      }
    }
    __atomic_store_n(turn, number + 1, __ATOMIC_RELEASE);
  }

  T sum_of_row(const T* from) const {
    Simd<T> sum(T(0));
    for (i64 c = 0; c < padded<T>(keys()); c += lanes<T>()) {
      sum = sum + Simd<T>::load(from + c);
    }
    return sum_of_lanes(sum);
  }

  static void add_strided(const Matrix& sum, i64 i, i64 col, i64 count, T value) {
    add_strided(sum, i, col, count, &value);
  }
  static void add_strided(const Matrix& sum, i64 i, i64 col, i64 count, const T* values) {
    T* to = static_cast<T*>(sum.data) + i * sum.row + col * sum.col;
    if (sum.col == 1) {
      return add(to, values, count, to);
    }
    for (i64 c = 0; c < count; ++c) {
      to[c * sum.col] += values[c];
    }
  }

  // The end of a head's walk: what a bias that is broadcast over queries has gathered.
  void finish_bias(const BiasGradient& bias, u32 number, const T* sums_by_key) const {
    options().wait_for(bias.turns, number);
    if (bias.over_keys) {
      T total = 0;
      for (i64 c = 0; c < keys(); ++c) {
        total += sums_by_key[c];
      }
      add_strided(bias.sum, 0, 0, 1, total);
    } else {
      add_strided(bias.sum, 0, key, keys(), sums_by_key);
    }
    __atomic_store_n(bias.turns, number + 1, __ATOMIC_RELEASE);
  }
};

template <class Operands>
size_t backward_scratch(const Options& options) {
  Arena arena(nullptr);
  const BackwardTiles<Operands> tiles(arena, options);
  return arena.used();
}

template <class T>
i64 sum_q_stride(const Options& options) {
  return padded<T>(options.head_dim);
}

template <class T>
size_t sum_kv(const Options& options) {
  return static_cast<size_t>(options.block_keys * (padded<T>(options.head_dim) + padded<T>(options.head_dim_v))) *
         sizeof(T);
}

// dk or dv: rounded and stored, or added to the sum of a split walk.
template <class T>
void finish_keys(const BackwardTask& task, i64 key, i64 keys, i64 cols, T* mine, i64 ld, T* sum, const Matrix& to) {
  for (i64 r = 0; r < keys; ++r) {
    T* row = mine + r * ld;
    T* sum_row = sum == nullptr ? nullptr : sum + r * padded<T>(cols);
    if (task.part > 0) {
      add(sum_row, row, cols, row);
    }
    if (task.part + 1 < task.parts) {
      convert_out(row, sum_row, cols);
    } else {
      store_row(row, to, key + r, 0, cols);
    }
  }
}

template <class Operands>
void backward(const BackwardTask& task, void* scratch) {
  using T = typename Operands::Number;
  const Options& options = *task.options;
  const SequenceArgs& sequence = task.sequence;
  Arena arena(scratch);
  const BackwardTiles<Operands> tiles(arena, options);
  const Operands& operands = tiles.operands;
  typename Operands::Unit unit;
  const math::Band<i64> band = band_of(sequence);
  const i64 key = task.key_block * options.block_keys;
  const i64 key_end = math::min(key + options.block_keys, sequence.k_len);
  const i64 keys = key_end - key;

  operands.load_keys(task, key, keys);

  const math::Interval<i64> met = band.queries_of_keys(key, key_end);
  const i64 first_block = met.begin / options.block_rows;
  const i64 blocks = math::max((met.end + options.block_rows - 1) / options.block_rows - first_block, i64(1));
  i64 heads_begun = 0;
  for (i64 step = task.walk_begin; step < task.walk_end; ++step) {
    const BackwardHead& head = task.heads[step / blocks];
    const i64 block = first_block + step % blocks;
    const i64 row = block * options.block_rows;
    const Tile<Operands> tile{
        task, head, tiles, unit, band, key, key_end, row, math::min(row + options.block_rows, sequence.q_len)};
    const bool begins = step == task.walk_begin || step % blocks == 0;
    const bool ends = step + 1 == task.walk_end || (step + 1) % blocks == 0;

    for (i64 i = row; i < row + Operands::kStrip; ++i) {
      tile.prefetch(i);
    }
    tile.load();
    tile.scores();
    tile.add_to_keys();
    if (options.need_q) {
      tile.add_to_queries(block);
    }
    for (int n = 0; n < 2; ++n) {
      const BiasGradient& bias = head.bias[n];
      if (bias.how == BiasSum::kNone) {
        continue;
      }
      T* sums_by_key = tiles.sums_by_key + n * operands.ld_s;
      if (begins) {
        fill(sums_by_key, operands.ld_s, T(0));
      }
      tile.add_to_bias(bias, block,
                       bias.turns != nullptr && !bias.over_queries ? bias.numbers[step - task.walk_begin] : 0,
                       sums_by_key);
      if (ends && bias.over_queries) {
        tile.finish_bias(bias, bias.numbers[heads_begun], sums_by_key);
      }
    }
    heads_begun += ends ? 1 : 0;
  }
  hwy::FlushStream();  // stores that bypassed the caches become visible to tasks that wait for this one

  if (options.need_k || options.need_v) {
    T* sum = static_cast<T*>(task.sum_kv);
    if (sum != nullptr) {
      options.wait_for(task.turn_kv, task.part);
    }
    if (options.need_k) {
      finish_keys(task, key, keys, options.head_dim, operands.dk_rows(options, keys), operands.ld_q, sum, task.grad_k);
    }
    if (options.need_v) {
      T* sum_v = sum == nullptr ? nullptr : sum + options.block_keys * padded<T>(options.head_dim);
      finish_keys(task, key, keys, options.head_dim_v, operands.dv_rows(options, keys), operands.ld_v, sum_v,
                  task.grad_v);
    }
    if (sum != nullptr) {
      __atomic_store_n(task.turn_kv, task.part + 1, __ATOMIC_RELEASE);
    }
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
