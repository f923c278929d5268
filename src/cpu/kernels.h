// SPDX-License-Identifier: Apache-2.0
//
// The interface between the schedulers (forward.cpp, backward.cpp: compiled once, for any processor) and the kernels
// (isa/kernels.cpp: compiled once for each instruction set). A scheduler cuts a problem into
// tasks, finds the rows of each in the caller's memory, and hands them to one table of functions, `Kernels`.
//
// Only aggregates and pointers: a function defined here would be emitted by every object that includes this, and
// the linker might keep the one that was compiled for AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::cpu {

// Rows by columns of the caller's memory. Strides count elements; `type` is a fovea_dtype, 0 if not given.
struct Matrix {
  void* data;
  std::int32_t type;
  std::int64_t row;
  std::int64_t col;
  bool add = false;  // what is stored is added to what is there; of ForwardHead::out: merged with it by lse
};

enum class Dropping : std::int32_t { kNone, kFovea, kTorch, kEverything };

// What all tasks of a call share.
struct Options {
  std::int64_t head_dim;
  std::int64_t head_dim_v;
  double scale;
  double softcap;
  Dropping dropping;
  std::uint32_t drop_below;  // fovea: the threshold; torch: words below this are dropped
  std::uint64_t seed;        // torch
  double keep_factor;
  std::int64_t block_rows;  // rows of a forward task, of a backward tile
  std::int64_t block_keys;
  bool need_q, need_k, need_v, need_bias;
  // Returns once *counter == value; what was written before it got there can be read.
  void (*wait_for)(const std::uint32_t* counter, std::uint32_t value);
  // Where the kernels leave the name of the instruction set they were compiled for.
  const char** ran;
};

// One batch entry: lengths, and the keys i + band_low <= j <= i + band_high that query i meets.
struct SequenceArgs {
  std::int64_t q_len;
  std::int64_t k_len;
  std::int64_t band_low;
  std::int64_t band_high;
  std::int64_t shift;
};

// One query head of a batch entry; row 0 is the first of its sequence.
struct HeadArgs {
  Matrix q;
  Matrix bias[2];
  Matrix mask;
  bool alibi;
  double slope;
  std::uint32_t drop_words[4];  // fovea: the words of this head
  std::uint64_t drop_base;      // torch: its first number
  std::uint64_t drop_stride;    //   and how many a row has
  std::uint32_t drop_row;       // fovea: the positions of row 0 and column 0, multiples of 16
  std::uint32_t drop_column;
};

struct ForwardHead {
  HeadArgs head;
  Matrix out;
  Matrix lse;   // one row: column i is query i
  double sink;  // -inf without one
};

// Rows [row_begin, row_end) of a batch entry and key head against keys [key_begin, key_end). Rows are numbered
// over the group of query heads: row r is query r % q_len of head r / q_len.
struct ForwardTask {
  const Options* options;
  SequenceArgs sequence;
  Matrix k, v;
  const ForwardHead* heads;  // of the group; only those that the rows touch are filled
  std::int64_t all_rows;     // of the batch entry and key head
  std::int64_t row_begin, row_end;
  std::int64_t key_begin, key_end;
  bool first_keys;  // these keys begin the row: the sink joins here
  void* partial;    // not NULL: leave the unfinished state here, for forward_merge
};

// The states of all parts of some rows, added up in order and written out.
struct MergeTask {
  const Options* options;
  SequenceArgs sequence;
  const ForwardHead* heads;
  std::int64_t row_begin, row_end;
  const void* partials;
  std::size_t partial_bytes;
  std::int64_t parts;
};

// The pass before the backward: values of each row that the tiles need, for rows [row_begin, row_end) of one head.
struct PrepareTask {
  const Options* options;
  std::int64_t row_begin, row_end;
  Matrix out, grad_out;
  Matrix lse, grad_lse;  // one row each, as in ForwardHead
  double sink;
  void* reference;    // by row: logsumexp, +inf for a dead row
  void* delta;        // by row
  double* grad_sink;  // this task's share of the sink's gradient; NULL: not computed
};

// A sum that several tasks add to, tile by tile, in a fixed order: task n adds when *turn == n, then sets it to n + 1.
enum class BiasSum : std::int32_t {
  kNone,   // not computed
  kStore,  // every element belongs to one task: stored
  kAdd     // summed in T
};

struct BiasGradient {
  BiasSum how;
  Matrix sum;         // kStore: the gradient; kAdd: elements of T; stride 0 where broadcast
  bool over_queries;  // broadcast over queries
  bool over_keys;
  std::uint32_t* turns;          // by query block, unless over_queries
  const std::uint32_t* numbers;  // this task's, in the order of its walk; over_queries: one a head of the walk
};

struct BackwardHead {
  HeadArgs head;
  Matrix grad_out;
  Matrix grad_q;          // rounded by the task that adds last
  const void* reference;  // of PrepareTask, by row of the sequence
  const void* delta;
  void* sum_q;  // rows of T, sum_q_stride apart
  std::int64_t sum_q_stride;
  bool sum_is_grad_q;      // the sum is kept in grad_q itself
  std::uint32_t* turns_q;  // by query block
  BiasGradient bias[2];
};

// Keys [key_begin, key_end), one block, of a batch entry and key head against all queries that meet them, for
// every head of the group: the steps [walk_begin, walk_end) of a walk over (head, query block).
struct BackwardTask {
  const Options* options;
  SequenceArgs sequence;
  Matrix k, v, grad_k, grad_v;
  const BackwardHead* heads;
  std::int64_t key_block;
  std::int64_t walk_begin, walk_end;
  // Where the walk is split among tasks: sums of dk and dv that they add to in turn, or NULL.
  void* sum_kv;
  std::uint32_t* turn_kv;
  std::uint32_t part;
  std::uint32_t parts;
};

// How problems are cut into tiles: the bytes of an element of an operand; of what rows and keys are multiples where
// there is more than one tile; how many there are at most.
struct Shape {
  std::int64_t element;
  std::int64_t row_step;
  std::int64_t key_step;
  std::int64_t forward_keys;
  std::int64_t backward_rows;
  std::int64_t backward_keys;
};

// A few rows of a batch entry and key head have a forward of their own, with products in the type of the sums.
// vector: numbers of that type. Inline always: no symbol of an instruction set's object may stand in for another's.
[[gnu::always_inline]] constexpr bool has_few_rows(std::int64_t rows, std::int64_t head_dim, std::int64_t head_dim_v,
                                                   std::int64_t vector) {
  constexpr std::int64_t kMost = 8;
  return rows <= kMost && head_dim >= vector && head_dim_v >= vector;
}

struct Kernels {
  const char* name;
  Shape shape;
  std::int64_t vector;  // numbers of the type of the sums
  // Sizes in bytes are multiples of Arena::kAlignment.
  std::size_t (*forward_scratch)(const Options& options);
  std::size_t (*forward_partial)(const Options& options);
  void (*forward)(const ForwardTask& task, void* scratch);
  void (*forward_merge)(const MergeTask& task, void* scratch);
  void (*prepare)(const PrepareTask& task, void* scratch);
  std::size_t (*backward_scratch)(const Options& options);
  std::int64_t (*sum_q_stride)(const Options& options);
  std::size_t (*sum_kv)(const Options& options);
  void (*backward)(const BackwardTask& task, void* scratch);
  // Rounds rows of T, contiguous and `stride` apart, into the caller's memory.
  void (*store)(const void* from, std::int64_t stride, const Matrix& to, std::int64_t rows, std::int64_t cols);
};

// Two tables for each instruction set: [0] computes in fp32, [1] in fp64; one for bf16 where a matrix unit multiplies
// it.
namespace portable {
extern const Kernels kernels[2];
}
namespace sse4 {
extern const Kernels kernels[2];
}
namespace avx2 {
extern const Kernels kernels[2];
}
namespace avx512 {
extern const Kernels kernels[2];
}
namespace avx512_bf16 {
extern const Kernels bf16_kernels;
}
namespace amx {
extern const Kernels bf16_kernels;
}
namespace neon {
extern const Kernels kernels[2];
}
namespace neon_bf16 {
extern const Kernels bf16_kernels;
}
// AMX by vectors, which tests link: NULL elsewhere.
namespace amx_emulated {
extern const Kernels bf16_kernels __attribute__((weak));
}

}  // namespace fovea::cpu
