// SPDX-License-Identifier: Apache-2.0
//
// The forward as tasks: one for each (batch entry, key head, block of rows). Rows run over the queries of all heads of
// the group, so that packed keys are used for the whole group. Where that gives too few tasks (few queries
// against many keys), keys are split as well: each part leaves a partial state, and a second round merges the parts in
// their order.
#include "cpu/schedule.h"

namespace fovea::cpu {
namespace {

class Forward {
 public:
  Forward(const Call& call, int threads, void* workspace)
      : call_(call),
        kernels_(kernels_for(call.problem.type)),
        options_(options_of(call)),
        group_(call.rows.heads_k > 0 ? call.rows.heads_q / call.rows.heads_k : 0),
        threads_(threads) {
    // Whether keys are split changes bits, and is for the problem alone to decide; how many rows a task has is not.
    use(forward_tiles_for(call, kEnoughTasks));
    parts_ = parts_of(units());
    if (parts_ == 1) {
      use(forward_tiles_for(call, kEnoughTasksOfThread * threads));
    }
    parallelism_ = units() * parts_;

    Arena arena(workspace);
    tickets_ = Tickets(arena, call.rows.batch());
    scratch_bytes_ = static_cast<i64>(kernels_.forward_scratch(options_));
    scratch_ = arena.take<char>(scratch_bytes_ * threads);
    head_memory_ = arena.take<ForwardHead>(group_ * threads);
    partial_bytes_ = kernels_.forward_partial(options_);
    partials_ = arena.take<char>(parts_ > 1 ? parallelism_ * static_cast<i64>(partial_bytes_) : 0);
    bytes_ = arena.used();
  }

  i64 parallelism() const { return parallelism_; }
  Tiles tiles() const { return {options_.block_rows, options_.block_keys}; }
  std::size_t bytes() const { return bytes_; }

  void run() {
    tickets_.fill([&](i64 b) { return call_.rows.heads_k * blocks_of(call_.rows.sequence(b).q_len) * parts_; });
    for_each_task(threads_, tickets_.count(), [&](int thread, i64 ticket) { attend(thread, ticket); });
    if (parts_ > 1) {
      for_each_task(threads_, tickets_.count() / parts_, [&](int thread, i64 unit) { merge(thread, unit); });
    }
  }

 private:
  static constexpr i64 kEnoughTasks = 32;
  static constexpr i64 kEnoughTasksOfThread = 8;

  void use(const Tiles& tiles) {
    options_.block_rows = tiles.rows;
    options_.block_keys = tiles.keys;
  }

  i64 units() const { return call_.rows.batch() * call_.rows.heads_k * blocks_of(call_.rows.limit_q); }

  i64 blocks_of(i64 q_len) const { return ceil_div(group_ * q_len, options_.block_rows); }

  // Into how many parts keys are split, for a problem with so many tasks otherwise.
  i64 parts_of(i64 units) const {
    if (units == 0 || units >= kEnoughTasks / 2) {
      return 1;
    }
    const i64 least_blocks = std::min<i64>(4, 1024 / options_.block_keys);  // of a part
    const i64 key_blocks = ceil_div(call_.rows.limit_k, options_.block_keys);
    return std::max<i64>(std::min(key_blocks / least_blocks, kEnoughTasks / units), 1);
  }

  // What a ticket stands for. Blocks come in falling order: under a causal mask the last is the longest.
  struct Unit {
    i64 b, head_k, row_begin, row_end, part;
    math::Sequence sequence;
  };
  Unit unit_of(i64 ticket) const {
    const Tickets::Place place = tickets_[ticket];
    const math::Sequence sequence = call_.rows.sequence(place.b);
    const i64 blocks = blocks_of(sequence.q_len);
    const i64 block = blocks - 1 - place.number / parts_ % blocks;
    const i64 row = block * options_.block_rows;
    return {place.b,
            place.number / parts_ / blocks,
            row,
            std::min(row + options_.block_rows, group_ * sequence.q_len),
            place.number % parts_,
            sequence};
  }

  // The heads of the group that the unit's rows touch.
  const ForwardHead* heads_of(const Unit& unit, int thread) {
    ForwardHead* heads = head_memory_ + group_ * thread;
    const i64 q_len = unit.sequence.q_len;
    for (i64 g = unit.row_begin / q_len; g * q_len < unit.row_end; ++g) {
      const i64 head = unit.head_k * group_ + g;
      heads[g] = {head_args(call_, unit.b, head, unit.sequence.q_begin),
                  rows_at(call_, call_.out, unit.b, head, unit.sequence.q_begin),
                  line_at(call_, call_.lse, unit.b, head, unit.sequence.q_begin), sink_of(call_, head)};
    }
    return heads;
  }

  void attend(int thread, i64 ticket) {
    const Unit unit = unit_of(ticket);
    const i64 blocks = ceil_div(ceil_div(unit.sequence.k_len, options_.block_keys), parts_);
    ForwardTask task{};
    task.options = &options_;
    task.sequence = sequence_args(call_, unit.b);
    task.k = rows_at(call_, call_.k, unit.b, unit.head_k, unit.sequence.k_begin);
    task.v = rows_at(call_, call_.v, unit.b, unit.head_k, unit.sequence.k_begin);
    task.heads = heads_of(unit, thread);
    task.all_rows = group_ * unit.sequence.q_len;
    task.row_begin = unit.row_begin;
    task.row_end = unit.row_end;
    task.key_begin = std::min(unit.part * blocks * options_.block_keys, unit.sequence.k_len);
    task.key_end = std::min((unit.part + 1) * blocks * options_.block_keys, unit.sequence.k_len);
    task.first_keys = unit.part == 0;
    task.partial = parts_ > 1 ? partials_ + ticket * static_cast<i64>(partial_bytes_) : nullptr;
    kernels_.forward(task, scratch_ + scratch_bytes_ * thread);
  }

  void merge(int thread, i64 number) {
    const Unit unit = unit_of(number * parts_);
    const MergeTask task{&options_,
                         sequence_args(call_, unit.b),
                         heads_of(unit, thread),
                         unit.row_begin,
                         unit.row_end,
                         partials_ + number * parts_ * static_cast<i64>(partial_bytes_),
                         partial_bytes_,
                         parts_};
    kernels_.forward_merge(task, scratch_ + scratch_bytes_ * thread);
  }

  const Call& call_;
  const Kernels& kernels_;
  Options options_;
  i64 group_;
  int threads_;
  i64 parts_ = 1;
  i64 parallelism_ = 0;
  std::size_t bytes_ = 0;
  Tickets tickets_;
  char* scratch_ = nullptr;
  i64 scratch_bytes_ = 0;
  ForwardHead* head_memory_ = nullptr;
  char* partials_ = nullptr;
  std::size_t partial_bytes_ = 0;
};

}  // namespace

i64 forward_parallelism(const Call& call, int threads) { return Forward(call, threads, nullptr).parallelism(); }

Tiles forward_tiles(const Call& call, int threads) { return Forward(call, threads, nullptr).tiles(); }

std::size_t forward_workspace(const Call& call, int threads) { return Forward(call, threads, nullptr).bytes(); }

void forward(const Call& call, const Plan& plan, void* workspace) { Forward(call, plan.threads, workspace).run(); }

}  // namespace fovea::cpu
