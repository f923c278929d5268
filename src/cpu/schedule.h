// SPDX-License-Identifier: Apache-2.0
//
// What both schedulers need: the kernels of this machine, tiles, where the rows of a (batch entry, head) lie, and
// which batch entry and part of it a ticket stands for. How a problem is cut into tasks depends on the problem alone,
// never on the number of threads: that is why results have the same bits for any number of them.
#pragma once

#include <algorithm>
#include <string>

#include "core/problem.h"
#include "cpu/arena.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace fovea::cpu {

using baseline::Arena;
using math::i64;

constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// The table for this machine (or the one that FOVEA_CPU_ISA forces) and this type.
const Kernels& kernels_for(DType type);

// The instruction set that the latest kernel ran with, as the kernel itself says; "" before the first.
const char* last_isa();

// Rows and keys of a forward task's block, fewer rows where there would not be so many tasks; of a backward tile. Every
// row has its bits whatever rows are with it, so that the number of threads may choose the rows of the forward.
struct Tiles {
  i64 rows;
  i64 keys;
};
Tiles forward_tiles_for(const Call& call, i64 enough_tasks);
Tiles backward_tiles(const Call& call);

// Options but for the tiles.
Options options_of(const Call& call);

SequenceArgs sequence_args(const Call& call, i64 b);

// A tensor with rows of head_dim, from row `begin` of (b, head) on; not given: type 0.
Matrix rows_at(const Call& call, const View& view, i64 b, i64 head, i64 begin);

// logsumexp or its gradient as one row.
Matrix line_at(const Call& call, const View& view, i64 b, i64 head, i64 begin);

// Everything but `out`, `lse` and the gradients.
HeadArgs head_args(const Call& call, i64 b, i64 head, i64 q_begin);

double sink_of(const Call& call, i64 head);

// Tickets 0 ... count - 1 over batch entries with different numbers of tasks.
class Tickets {
 public:
  Tickets() = default;
  Tickets(Arena& arena, i64 batch) : batch_(batch), ends_(arena.take<i64>(batch)) {}

  template <class TasksOf>
  void fill(TasksOf tasks_of) {
    i64 total = 0;
    for (i64 b = 0; b < batch_; ++b) {
      ends_[b] = total += tasks_of(b);
    }
  }

  i64 count() const { return batch_ > 0 ? ends_[batch_ - 1] : 0; }

  // The first ticket of a batch entry.
  i64 begin(i64 b) const { return b > 0 ? ends_[b - 1] : 0; }

  // The batch entry that a ticket belongs to, and its number there.
  struct Place {
    i64 b;
    i64 number;
  };
  Place operator[](i64 ticket) const {
    const i64 b = std::upper_bound(ends_, ends_ + batch_, ticket) - ends_;
    return {b, ticket - begin(b)};
  }

 private:
  i64 batch_ = 0;
  i64* ends_ = nullptr;
};

// The two directions' parts of plan(): the most tasks that run at once, the tiles, and the memory for so many threads.
i64 forward_parallelism(const Call& call, int threads);
Tiles forward_tiles(const Call& call, int threads);
std::size_t forward_workspace(const Call& call, int threads);
i64 backward_parallelism(const Call& call);
std::size_t backward_workspace(const Call& call, int threads);

}  // namespace fovea::cpu
