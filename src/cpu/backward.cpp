// SPDX-License-Identifier: Apache-2.0
//
// The backward as tasks, in three rounds:
//
//     prepare   a task for each (batch entry, head, block of queries): delta and logsumexp by row, its share of the
//               sink's gradient, zeros for queries that meet no key
//     tiles     a task for each (batch entry, key head, block of keys), as in isa/backward.h; where that gives too few
//               (few keys against many queries), the walk over the queries is split too
//     finish    rounds what was summed aside
//
// dq is summed in grad_q itself if that has the type of accumulation, else aside; to bound the memory for that, key
// heads are then taken a chunk at a time.
#include <cstring>

#include "core/element.h"
#include "cpu/bias_gradient.h"
#include "cpu/schedule.h"

namespace fovea::cpu {
namespace {

class Backward {
 public:
  Backward(const Call& call, int threads, void* workspace)
      : call_(call),
        kernels_(kernels_for(call.problem.type)),
        options_(options_of(call)),
        tiles_(backward_tiles(call)),
        group_(call.rows.heads_k > 0 ? call.rows.heads_q / call.rows.heads_k : 0),
        threads_(threads) {
    const math::Rows& rows = call.rows;
    options_.block_rows = tiles_.rows;
    options_.block_keys = tiles_.keys;
    element_ = call.problem.type == DType::kFp64 ? 8 : 4;
    sum_is_grad_q_ = size_of(call.grad_q.type) == static_cast<std::size_t>(element_) && call.grad_q.strides.col == 1 &&
                     !call.grad_q.accumulate;
    sum_q_stride_ = kernels_.sum_q_stride(options_);
    const i64 pairs = rows.batch() * rows.heads_k;
    const i64 units = pairs * ceil_div(rows.limit_k, tiles_.keys);
    const i64 steps = group_ * ceil_div(rows.limit_q, tiles_.rows);
    parts_ = parts_of(units, steps);
    parallelism_ = std::max(units * parts_, query_blocks_bound());
    pairs_a_chunk_ = pairs_of_chunk(pairs);

    Arena arena(workspace);
    query_tickets_ = Tickets(arena, rows.batch());
    key_tickets_ = Tickets(arena, rows.batch());
    const i64 all_rows = rows.heads_q * rows.rows_q * (rows.packed() ? 1 : rows.batch());
    reference_ = arena.take<char>(all_rows * element_);
    delta_ = arena.take<char>(all_rows * element_);
    turns_q_ = arena.take<std::uint32_t>(options_.need_q ? query_blocks_bound() : 0);
    sink_shares_ = arena.take<double>(call.grad_sink ? query_blocks_bound() : 0);
    sum_q_ = arena.take<char>(pairs_a_chunk_ * group_ * rows.limit_q * sum_q_stride_ * element_);
    sum_kv_bytes_ = static_cast<i64>(kernels_.sum_kv(options_));
    sum_kv_ = arena.take<char>(parts_ > 1 ? units * sum_kv_bytes_ : 0);
    turns_kv_ = arena.take<std::uint32_t>(parts_ > 1 ? units : 0);
    bias_[0] = BiasGradientSums(call, call.grad_bias, call.problem.bias, tiles_, steps, threads, arena);
    bias_[1] = BiasGradientSums(call, call.grad_bias2, call.problem.bias2, tiles_, steps, threads, arena);
    zeros_bytes_ = element_ * std::max({options_.need_q ? call.problem.head_dim : 0, bias_[0].zero_columns(),
                                        bias_[1].zero_columns()});
    zeros_ = arena.take<char>(zeros_bytes_);
    head_memory_ = arena.take<BackwardHead>(group_ * threads);
    scratch_bytes_ = static_cast<i64>(kernels_.backward_scratch(options_));
    scratch_ = arena.take<char>(scratch_bytes_ * threads);
    bytes_ = arena.used();
  }

  i64 parallelism() const { return parallelism_; }
  std::size_t bytes() const { return bytes_; }

  void run() {
    query_tickets_.fill([&](i64 b) { return call_.rows.heads_q * query_blocks(call_.rows.sequence(b)); });
    key_tickets_.fill([&](i64 b) { return call_.rows.heads_k * key_blocks(call_.rows.sequence(b)) * parts_; });
    std::memset(zeros_, 0, static_cast<std::size_t>(zeros_bytes_));
    if (options_.need_q) {
      std::fill_n(turns_q_, query_tickets_.count(), 0u);
    }
    if (parts_ > 1) {
      std::fill_n(turns_kv_, key_tickets_.count() / parts_, 0u);
    }
    for (BiasGradientSums& bias : bias_) {
      if (bias) {
        bias.clear(threads_, kernels_, zeros_);
      }
    }
    for_each_task(threads_, query_tickets_.count(), [&](int thread, i64 ticket) { prepare(thread, ticket); });
    if (options_.need_q || options_.need_k || options_.need_v || options_.need_bias) {
      run_tiles();
    }
    for (BiasGradientSums& bias : bias_) {
      if (bias) {
        bias.finish(threads_, kernels_);
      }
    }
    if (call_.grad_sink) {
      finish_sink();
    }
  }

 private:
  i64 query_blocks(const math::Sequence& sequence) const { return ceil_div(sequence.q_len, tiles_.rows); }
  i64 key_blocks(const math::Sequence& sequence) const { return ceil_div(sequence.k_len, tiles_.keys); }

  // At least the number of (batch entry, head, block of queries), whatever the lengths are.
  i64 query_blocks_bound() const {
    const math::Rows& rows = call_.rows;
    return rows.heads_q * (rows.packed() ? rows.rows_q / tiles_.rows + rows.batch()
                                         : rows.batch() * ceil_div(rows.rows_q, tiles_.rows));
  }

  // Into how many parts the walks of so many tasks are split.
  static i64 parts_of(i64 units, i64 steps) {
    constexpr i64 kEnoughTasks = 16;
    constexpr i64 kLeastSteps = 2;  // of a part
    if (units == 0 || units >= kEnoughTasks) {
      return 1;
    }
    return std::max<i64>(std::min(steps / kLeastSteps, 2 * kEnoughTasks / units), 1);
  }

  // How many (batch entry, key head) share the memory for sums of dq.
  i64 pairs_of_chunk(i64 pairs) const {
    constexpr i64 kBytes = 64 * 1024 * 1024;
    if (!options_.need_q || sum_is_grad_q_) {
      return 0;
    }
    const i64 each = std::max<i64>(group_ * call_.rows.limit_q * sum_q_stride_ * element_, 1);
    return std::min(std::max<i64>(kBytes / each, 1), pairs);
  }

  // Where the rows of a head begin in what prepare() leaves.
  i64 row_base(const math::Sequence& sequence, i64 b, i64 head) const {
    const math::Rows& rows = call_.rows;
    return rows.packed() ? head * rows.rows_q + sequence.q_begin : (b * rows.heads_q + head) * rows.rows_q;
  }

  math::Band<i64> band_of(i64 b, const math::Sequence& sequence) const { return call_.problem.band(b, sequence); }

  void prepare(int thread, i64 ticket) {
    const Tickets::Place place = query_tickets_[ticket];
    const math::Sequence sequence = call_.rows.sequence(place.b);
    const i64 blocks = query_blocks(sequence);
    const i64 head = place.number / blocks;
    PrepareTask task{};
    task.options = &options_;
    task.row_begin = place.number % blocks * tiles_.rows;
    task.row_end = std::min(task.row_begin + tiles_.rows, sequence.q_len);
    task.out = rows_at(call_, call_.out, place.b, head, sequence.q_begin);
    task.grad_out = rows_at(call_, call_.grad_out, place.b, head, sequence.q_begin);
    task.lse = line_at(call_, call_.lse, place.b, head, sequence.q_begin);
    task.grad_lse = line_at(call_, call_.grad_lse, place.b, head, sequence.q_begin);
    task.sink = sink_of(call_, head);
    task.reference = reference_ + row_base(sequence, place.b, head) * element_;
    task.delta = delta_ + row_base(sequence, place.b, head) * element_;
    task.grad_sink = call_.grad_sink ? sink_shares_ + ticket : nullptr;
    kernels_.prepare(task, scratch_ + scratch_bytes_ * thread);
    if (options_.need_q && band_of(place.b, sequence).keys_of_rows(task.row_begin, task.row_end).empty()) {
      kernels_.store(zeros_, 0, rows_at(call_, call_.grad_q, place.b, head, sequence.q_begin + task.row_begin),
                     task.row_end - task.row_begin, call_.problem.head_dim);
    }
  }

  // A block of keys and its part of the walk.
  struct Unit {
    i64 b, head_k, key_block, part;
    math::Sequence sequence;
    i64 first_block, blocks;  // the query blocks that meet the keys
    i64 walk_begin, walk_end;
  };
  Unit unit_of(i64 ticket) const {
    const Tickets::Place place = key_tickets_[ticket];
    const math::Sequence sequence = call_.rows.sequence(place.b);
    const i64 blocks = key_blocks(sequence);
    Unit unit{place.b,
              place.number / parts_ / blocks,
              place.number / parts_ % blocks,
              place.number % parts_,
              sequence,
              0,
              0,
              0,
              0};
    const i64 key = unit.key_block * tiles_.keys;
    const math::Interval<i64> met =
        band_of(place.b, sequence).queries_of_keys(key, std::min(key + tiles_.keys, sequence.k_len));
    if (!met.empty()) {
      unit.first_block = met.begin / tiles_.rows;
      unit.blocks = ceil_div(met.end, tiles_.rows) - unit.first_block;
    }
    unit.walk_begin = group_ * unit.blocks * unit.part / parts_;
    unit.walk_end = group_ * unit.blocks * (unit.part + 1) / parts_;
    return unit;
  }

  void run_tiles() {
    const i64 pairs = call_.rows.batch() * call_.rows.heads_k;
    const i64 chunk = pairs_a_chunk_ > 0 ? pairs_a_chunk_ : pairs;
    for (i64 pair = 0; pair < pairs; pair += chunk) {
      for_each_task(
          threads_, first_ticket(pair), first_ticket(std::min(pair + chunk, pairs)),
          [&](int thread, i64 ticket) { number_walk(thread, ticket); },
          [&](int thread, i64 ticket) { walk(thread, ticket, pair); });
    }
  }

  i64 first_ticket(i64 pair) const {
    const i64 b = pair / call_.rows.heads_k;
    if (b == call_.rows.batch()) {
      return key_tickets_.count();
    }
    return key_tickets_.begin(b) + pair % call_.rows.heads_k * key_blocks(call_.rows.sequence(b)) * parts_;
  }

  void number_walk(int thread, i64 ticket) {
    if (!options_.need_bias) {
      return;
    }
    const Unit unit = unit_of(ticket);
    for (BiasGradientSums& bias : bias_) {
      bias.number_walk(thread, unit.b, unit.head_k * group_, unit.key_block, unit.first_block, unit.blocks,
                       unit.walk_begin, unit.walk_end);
    }
  }

  void walk(int thread, i64 ticket, i64 first_pair) {
    const Unit unit = unit_of(ticket);
    BackwardTask task{};
    task.options = &options_;
    task.sequence = sequence_args(call_, unit.b);
    task.k = rows_at(call_, call_.k, unit.b, unit.head_k, unit.sequence.k_begin);
    task.v = rows_at(call_, call_.v, unit.b, unit.head_k, unit.sequence.k_begin);
    task.grad_k = rows_at(call_, call_.grad_k, unit.b, unit.head_k, unit.sequence.k_begin);
    task.grad_v = rows_at(call_, call_.grad_v, unit.b, unit.head_k, unit.sequence.k_begin);
    task.key_block = unit.key_block;
    task.walk_begin = unit.walk_begin;
    task.walk_end = unit.walk_end;
    task.part = static_cast<std::uint32_t>(unit.part);
    task.parts = static_cast<std::uint32_t>(parts_);
    if (parts_ > 1) {
      task.sum_kv = sum_kv_ + ticket / parts_ * sum_kv_bytes_;
      task.turn_kv = turns_kv_ + ticket / parts_;
    }
    BackwardHead* heads = head_memory_ + group_ * thread;
    task.heads = heads;
    for (i64 step = unit.walk_begin; step < unit.walk_end; step = (step / unit.blocks + 1) * unit.blocks) {
      const i64 g = step / unit.blocks;
      const i64 pair = unit.b * call_.rows.heads_k + unit.head_k - first_pair;
      fill_head(heads[g], thread, unit, unit.head_k * group_ + g, pair * group_ + g);
    }
    kernels_.backward(task, scratch_ + scratch_bytes_ * thread);
  }

  // `slot`: the number of the head within the chunk.
  void fill_head(BackwardHead& to, int thread, const Unit& unit, i64 head, i64 slot) const {
    const math::Sequence& sequence = unit.sequence;
    to = {};
    to.head = head_args(call_, unit.b, head, sequence.q_begin);
    to.grad_out = rows_at(call_, call_.grad_out, unit.b, head, sequence.q_begin);
    to.reference = reference_ + row_base(sequence, unit.b, head) * element_;
    to.delta = delta_ + row_base(sequence, unit.b, head) * element_;
    if (options_.need_q) {
      to.grad_q = rows_at(call_, call_.grad_q, unit.b, head, sequence.q_begin);
      to.sum_is_grad_q = sum_is_grad_q_;
      to.sum_q = sum_is_grad_q_ ? to.grad_q.data : sum_q_ + slot * call_.rows.limit_q * sum_q_stride_ * element_;
      to.sum_q_stride = sum_is_grad_q_ ? to.grad_q.row : sum_q_stride_;
      to.turns_q = turns_q_ + query_tickets_.begin(unit.b) + head * query_blocks(sequence);
    }
    for (int n = 0; n < 2; ++n) {
      to.bias[n] = bias_[n].of_head(thread, unit.b, head, unit.key_block);
    }
  }

  // The shares of all batch entries and blocks, in their order.
  void finish_sink() const {
    for (i64 head = 0; head < call_.rows.heads_q; ++head) {
      double sum = 0;
      for (i64 b = 0; b < call_.rows.batch(); ++b) {
        const i64 blocks = query_blocks(call_.rows.sequence(b));
        const double* shares = sink_shares_ + query_tickets_.begin(b) + head * blocks;
        for (i64 block = 0; block < blocks; ++block) {
          sum += shares[block];
        }
      }
      const View& view = call_.grad_sink;
      const double before = view.accumulate ? load(view.data, view.type, head * view.strides.head) : 0;
      store(view.data, view.type, head * view.strides.head, before + sum);
    }
  }

  const Call& call_;
  const Kernels& kernels_;
  Options options_;
  Tiles tiles_;
  i64 group_;
  int threads_;
  i64 element_ = 0;  // bytes of the type of accumulation
  bool sum_is_grad_q_ = false;
  i64 sum_q_stride_ = 0;
  i64 parts_ = 1;
  i64 parallelism_ = 0;
  i64 pairs_a_chunk_ = 0;
  std::size_t bytes_ = 0;

  Tickets query_tickets_;  // of (head, block of queries)
  Tickets key_tickets_;    // of (key head, block of keys, part of the walk)
  char* reference_ = nullptr;
  char* delta_ = nullptr;
  std::uint32_t* turns_q_ = nullptr;  // by query ticket
  double* sink_shares_ = nullptr;     // by query ticket
  char* sum_q_ = nullptr;
  char* sum_kv_ = nullptr;
  i64 sum_kv_bytes_ = 0;
  std::uint32_t* turns_kv_ = nullptr;
  char* zeros_ = nullptr;
  i64 zeros_bytes_ = 0;
  BiasGradientSums bias_[2];
  BackwardHead* head_memory_ = nullptr;
  char* scratch_ = nullptr;
  i64 scratch_bytes_ = 0;
};

}  // namespace

i64 backward_parallelism(const Call& call) { return Backward(call, 1, nullptr).parallelism(); }

std::size_t backward_workspace(const Call& call, int threads) { return Backward(call, threads, nullptr).bytes(); }

void backward(const Call& call, const Plan& plan, void* workspace) { Backward(call, plan.threads, workspace).run(); }

}  // namespace fovea::cpu
