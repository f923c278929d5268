// SPDX-License-Identifier: Apache-2.0
#include "cpu/schedule.h"

#include "core/element.h"

namespace fovea::cpu {
namespace {

const char* ran = "";

// The operands of a tile should stay in a second-level cache of 1 MiB, with room for what streams through it.
constexpr i64 kOperandBytes = 256 * 1024;

// As many units of `step` as fit, within [least, most].
i64 fitting(i64 bytes_each, i64 step, i64 least, i64 most) {
  return std::clamp(kOperandBytes / std::max<i64>(bytes_each, 1) / step * step, least, most);
}

i64 row_bytes(const Problem& problem, const Shape& shape) {
  return (problem.head_dim + problem.head_dim_v) * shape.element;
}

Matrix matrix(const Call& call, const View& view, i64 b, i64 head, i64 row) {
  if (!view) {
    return {};
  }
  // Tensors without elements may have no memory, and then no offset either.
  char* data = static_cast<char*>(view.data);
  if (data != nullptr) {
    data += call.rows.offset(view.strides, b, head, row) * static_cast<i64>(size_of(view.type));
  }
  return {data, static_cast<std::int32_t>(view.type), view.strides.row, view.strides.col, view.accumulate};
}

Dropping dropping_of(const math::Dropout& dropout) {
  if (!dropout.active()) {
    return Dropping::kNone;
  }
  if (dropout.keeps_nothing()) {
    return Dropping::kEverything;
  }
  return dropout.rng == math::Rng::kFovea ? Dropping::kFovea : Dropping::kTorch;
}

// torch_mem_efficient compares a float made of a random word, and that function does not decrease: the words that
// are kept are those from some word on, which is found here once so that kernels compare integers.
std::uint32_t lowest_kept_word(float p) {
  std::uint64_t low = 0;
  std::uint64_t high = std::uint64_t{1} << 32;
  while (low < high) {
    const std::uint64_t middle = (low + high) / 2;
    if (math::torch_uniform_of_word(static_cast<std::uint32_t>(middle)) > p) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return static_cast<std::uint32_t>(low);  // p < 1, so that the last word at least is kept
}

}  // namespace

const char* last_isa() { return __atomic_load_n(&ran, __ATOMIC_RELAXED); }

Tiles forward_tiles_for(const Call& call, i64 enough_tasks) {
  const Problem& problem = call.problem;
  const Shape& shape = kernels_for(problem.type).shape;
  // More rows share the packing of a block of keys; fewer give more tasks. Rows and their output pass through the cache
  // once a block of keys: they may take half as much again as its operands.
  const i64 step = shape.row_step;
  const i64 most = fitting(row_bytes(problem, shape) * 2 / 3, step, step, 384 / step * step);
  const i64 group = problem.heads_k > 0 ? problem.heads_q / problem.heads_k : 0;
  const i64 rows = std::max<i64>(group * call.rows.limit_q, 1);
  i64 tile = std::min(most, ceil_div(rows, 16) * 16);
  while (tile > 96 && problem.batch() * problem.heads_k * ceil_div(rows, tile) < enough_tasks) {
    tile = (tile - 1) / step * step;  // whole strips, so that rows have the same neighbours whatever the tile is
  }
  if (tile < rows) {  // as many tasks, of about equal rows: the last one packs all keys, too
    tile = ceil_div(ceil_div(rows, ceil_div(rows, tile)), step) * step;
  }
  const i64 keys = std::max<i64>(ceil_div(call.rows.limit_k, 16) * 16, 16);
  return {tile, std::min(fitting(row_bytes(problem, shape), shape.key_step, 32, shape.forward_keys), keys)};
}

Tiles backward_tiles(const Call& call) {
  const Problem& problem = call.problem;
  const Shape& shape = kernels_for(problem.type).shape;
  const i64 rows = std::max<i64>(ceil_div(call.rows.limit_q, 16) * 16, 16);
  const i64 keys = std::max<i64>(ceil_div(call.rows.limit_k, 16) * 16, 16);
  return {std::min(fitting(2 * row_bytes(problem, shape), shape.row_step, shape.row_step, shape.backward_rows), rows),
          std::min(fitting(row_bytes(problem, shape), shape.key_step, 32, shape.backward_keys), keys)};
}

Options options_of(const Call& call) {
  const Problem& problem = call.problem;
  Options options{};
  options.head_dim = problem.head_dim;
  options.head_dim_v = problem.head_dim_v;
  options.scale = problem.scale_or_default();
  options.softcap = problem.softcap;
  options.dropping = dropping_of(call.dropout);
  options.drop_below = options.dropping == Dropping::kTorch ? lowest_kept_word(call.dropout.p) : call.dropout.threshold;
  options.seed = call.dropout.seed;
  options.keep_factor = call.dropout.active() ? call.dropout.factor() : 1;
  options.need_q = static_cast<bool>(call.grad_q);
  options.need_k = static_cast<bool>(call.grad_k);
  options.need_v = static_cast<bool>(call.grad_v);
  options.need_bias = call.grad_bias || call.grad_bias2;
  options.wait_for = wait_for;
  options.ran = &ran;
  return options;
}

SequenceArgs sequence_args(const Call& call, i64 b) {
  const math::Sequence sequence = call.rows.sequence(b);
  const math::Band<i64> band = call.problem.band(b, sequence);
  return {sequence.q_len, sequence.k_len, band.low, band.high, call.problem.shift(b, sequence)};
}

Matrix rows_at(const Call& call, const View& view, i64 b, i64 head, i64 begin) {
  return matrix(call, view, b, head, begin);
}

Matrix line_at(const Call& call, const View& view, i64 b, i64 head, i64 begin) {
  Matrix line = matrix(call, view, b, head, begin);
  line.col = line.row;
  line.row = 0;
  return line;
}

HeadArgs head_args(const Call& call, i64 b, i64 head, i64 q_begin) {
  HeadArgs args{};
  args.q = matrix(call, call.q, b, head, q_begin);
  args.bias[0] = matrix(call, call.bias, b, head, 0);
  args.bias[1] = matrix(call, call.bias2, b, head, 0);
  args.mask = matrix(call, call.mask, b, head, 0);
  args.alibi = static_cast<bool>(call.alibi_slopes);
  if (args.alibi) {
    args.slope =
        load(call.alibi_slopes.data, call.alibi_slopes.type, call.rows.offset(call.alibi_slopes.strides, b, head, 0));
  }
  if (call.dropout.active()) {
    const math::DropoutOfHead dropout = call.dropout_of_head(b, head);
    args.drop_words[0] = dropout.head.k0;
    args.drop_words[1] = dropout.head.k1;
    args.drop_words[2] = dropout.head.w0;
    args.drop_words[3] = dropout.head.w1;
    args.drop_base = dropout.base;
    args.drop_stride = dropout.row_stride;
    args.drop_row = static_cast<std::uint32_t>(call.problem.first_query(b));
    args.drop_column = static_cast<std::uint32_t>(call.problem.first_key(b));
  }
  return args;
}

double sink_of(const Call& call, i64 head) {
  return call.sink ? load(call.sink.data, call.sink.type, head * call.sink.strides.head)
                   : -math::Limits<double>::infinity();
}

}  // namespace fovea::cpu
