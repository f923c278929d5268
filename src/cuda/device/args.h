// SPDX-License-Identifier: Apache-2.0
//
// Args: what a kernel is called with, one struct for all kernels (under 4 KB, passed as a __grid_constant__). Filled
// by src/cuda/launch and src/cuda/kernels. Read by the host and, without any header, by NVRTC.
//
// Everything that a kernel copies by 16 bytes is aligned when it gets here: rows begin at multiples of 16 bytes, the
// last dimension is contiguous. The launcher packs what the caller gave otherwise into the workspace
// (around/prepare.cuh), but not a bias with odd rows (sm90/odd_rows.h). Rows of tiles (q, k, v, do, biases) are 0 to
// kRowBytesLimit - 1 bytes apart; key_term and query_term are contiguous along keys and queries, and their planes are
// aligned to 16 bytes.
#pragma once

#include "cuda/device/score/position_terms.h"
#include "cuda/device/shard.h"
#include "cuda/device/tensor.h"
#include "math/dropout.h"
#include "math/rows.h"

namespace fovea::cuda {

using math::i32;
using math::i64;
using math::u32;
using math::u64;

// A random number's parameters: the call's value, plus what lies on the device (CUDA graphs, PyTorch's generator).
struct Seed {
  u64 value = 0;
  const u64* pointer = nullptr;

  constexpr u64 now() const { return value + (pointer != nullptr ? *pointer : 0); }  // on the device
};

// How a kernel with Features::fp32_results stores a result.
struct Result {
  bool fp32 : 1 = false;  // whatever the type of q
  bool adds : 1 = false;  // what is there is added; out is merged with it by the logsumexp
};
struct ResultArgs {
  Result out, q, k, v;  // of the backward: q, k, v are gradients, and out is read
};

struct Args {
  math::Rows rows;
  i64 first_block = 0;         // added to blockIdx.x: a grid of 2^31 blocks or more (under 2^32) is launched in pieces
  int out_dim = 0;             // columns of grad_q, grad_k as the caller has them: head_dim before packing
  int out_dim_v = 0;           // of out, grad_v
  bool vector_stores = false;  // out (backward: grad_q, grad_k, grad_v) may be written by 16 bytes
  int head_dim = 0;            // columns of q and k that exist: a multiple of 8 (after packing), at most Spec::d
  int head_dim_v = 0;          // of v and out
  float scale = 1;
  float softcap = 0;
  bool causal = false;
  bool top_left = false;
  i64 window_left = -1;
  i64 window_right = -1;

  Tensor q, k, v;
  Tensor out;          // any strides; by elements where rows are not aligned or columns are apart
  Tensor lse;          // fp32: batch1, batch2, head, row; data may be null in the forward
  Tensor bias, bias2;  // with BiasTile: queries x keys, rows aligned to 16 bytes unless odd
  Tensor mask;         // with Spec::mask: words of 32 keys, bit j % 32 of word j / 32; `row` strides in words.
                       // sm90_forward has words of another order here (sm90/forward_mask.cuh)
  Tensor key_term;     // with Spec::key_term: fp32, by head and key (`col` is the key, contiguous); -inf: not allowed
  Tensor query_term;   // with Spec::query_term: fp32, by head and query (`row`)
  PositionArgs positions;
  const float* sink = nullptr;
  i64 sink_stride = 0;

  math::Rng rng = math::Rng::kFovea;
  u32 drop_threshold = 0;  // fovea: keep iff u >= it
  float drop_p = 0;        // torch_mem_efficient: keep iff uniform > it
  float keep_scale = 1;
  Seed seed, offset;
  i64 dropout_plane = 0;  // torch_mem_efficient: numbers a head

  // ---- parts of keys (forward; where sm90_forward joins them these lie as forward_join.cuh says) ----
  int splits = 1;
  float* partial_out = nullptr;  // [split][padded row][head][dv]
  float* partial_sum = nullptr;  // [split][head][padded row][2]: the row's reference, its sum of weights

  // ---- backward ----
  // Row vectors of the backward lie at [head][row_of(b) + i], fp32: sequences padded to kRowPad (see padded_row).
  Tensor grad_out;
  Tensor grad_lse;
  float* row_lse = nullptr;    // logsumexp, in the unit that the kernel subtracts; +inf where nothing is attended
  float* row_delta = nullptr;  // <do, o> - dlse
  float* row_term = nullptr;   // query_term, for kernels that take it by tiles of padded rows
  i64 padded_rows = 0;         // of one head, all sequences
  float* dq_sum = nullptr;     // [head][padded row][d] in register order (around/convert.cuh), or as turned_sums() says
  // sm90_backward: a ticket; then for a step's rows of dq_sum (turn_of_row) how many blocks have added to them (in
  // order), or that one stores there (1) or has stored (2).
  u32* turns = nullptr;
  Tensor grad_q, grad_k, grad_v;
  float lse_factor = 1;       // backward_prepare: row_lse in units of the scores (1) or of their powers of 2 (log2 e)
  ResultArgs results;         // of the forward, too
  float* row_sum = nullptr;   // sums of dS over keys, as row_lse lies: gradients of biases that are broadcast over keys
  float* sink_sum = nullptr;  // [head][b][pad of rows]: partial sums of the sink's gradient
  float* grad_sink = nullptr;
  i64 grad_sink_stride = 0;
  Tensor grad_bias;   // of the bias that a bias gradient kernel is launched for; stride 0: summed over
  int bias_rows = 0;  // queries and keys of that bias; 1 where the gradient is broadcast over them
  int bias_keys = 0;
  int bias_list = 0;            // (b, h) pairs that share a plane of the bias
  int bias_chunks = 1;          // pieces that the list is cut into
  float* bias_sum = nullptr;    // partial sums, a plane a chunk; adds_bias: as added_bias.h says
  u32* bias_tickets = nullptr;  // sm90_bias_gradient: tiles that blocks have taken, for either bias
  float* column_sum = nullptr;  // [b][head][column_pitch]: sums of dS over queries, of biases without queries
  i64 column_pitch = 0;         // at least limit_k

  // ---- fp32 as pairs of fp16 ----
  u32* sizes = nullptr;  // [7][b][head]: bits of the largest |q|, |k|, |v|, |do|, row norms of v, do; |delta|

  ShardArgs shard;  // the last: where all else lies does not depend on it
};

// Where a number of Args::sizes lies; k and v count their own heads.
enum class Size : int { kQ, kK, kV, kGradOut, kRowOfV, kRowOfGradOut, kDelta, kCount };
constexpr i64 size_place(const math::Rows& rows, Size which, i64 b, i64 head) {
  const bool of_keys = which == Size::kK || which == Size::kV || which == Size::kRowOfV;
  return i64(which) * rows.batch() * rows.heads_q + b * (of_keys ? rows.heads_k : rows.heads_q) + head;
}

// What lies behind the turns, for sm90_backward.
struct BehindTurns {
  u32* taken;  // converts: steps' rows that some warp converts
  u32* added;  // converts: for a step's rows of dq_sum (turn_of_row) how many blocks have added to them
  u32* parts;  // last_parts: for half of the columns of 16 rows of sums how many parts have left theirs
  u32* order;  // longest_first: batch entries, the one with the most queries first
  static constexpr int kCounters = 4;  // of `parts`, for 64 rows
  static constexpr i64 turns(i64 padded_rows, i64 heads) { return padded_rows * heads / 64; }
  static constexpr i64 size(i64 turns, i64 batch) {
    return 2 + (2 + kCounters) * turns + batch;
  }  // with the turns and their ticket
  constexpr explicit BehindTurns(const Args& a)
      : taken(a.turns + 1 + turns(a.padded_rows, a.rows.heads_q)),
        added(taken + 1),
        parts(added + turns(a.padded_rows, a.rows.heads_q)),
        order(parts + kCounters * turns(a.padded_rows, a.rows.heads_q)) {}
};

// What a tile's rows may be apart, so that offsets in a tile have 32 bits.
constexpr i64 kRowBytesLimit = i64(1) << 24;

// Sequences are padded so that a tile of rows never crosses into the next one; steps of 80 queries are cut there.
constexpr int kRowPad = 128;
template <class Int>
constexpr Int padded(Int rows) {
  return (rows + kRowPad - 1) / kRowPad * kRowPad;
}

// Where row 0 of batch entry b lies in a padded row vector. Dense: b * Sq padded; packed: cu_seqlens plus b pads.
constexpr i64 padded_row(const math::Rows& rows, i64 b, const math::Sequence& sequence) {
  return rows.is_packed ? (sequence.q_begin / kRowPad + b) * kRowPad : b * padded(rows.rows_q);
}

// The same in row_lse, row_delta, row_sum, dq_sum (rows of it), which have a part for each head.
constexpr i64 row_of_head(const Args& a, i64 b, i64 head, const math::Sequence& sequence) {
  return head * a.padded_rows + padded_row(a.rows, b, sequence);
}

// Where Args::turns (behind the ticket) and BehindTurns::added count for the step that begins with this row: steps have
// 64 rows or more, so that each has a number of its own.
constexpr i64 turn_of_row(i64 row) { return row / 64; }

// Where a row of a half of dq_sum's columns lies that steps of 80 queries have added to (sm90_turns_dq).
constexpr int kTurnedQueries = 80;
constexpr int kTurnedColumns = 64;
constexpr i64 turned_sums(const Args& a, int half, i64 row) {
  return (half * a.padded_rows * a.rows.heads_q + row) * kTurnedColumns;
}

// Rows of a padded vector for all batch entries.
constexpr i64 padded_rows(const math::Rows& rows) {
  return rows.is_packed ? (rows.rows_q / kRowPad + rows.batch()) * kRowPad : rows.batch() * padded(rows.rows_q);
}

}  // namespace fovea::cuda
