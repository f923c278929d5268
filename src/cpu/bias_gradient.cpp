// SPDX-License-Identifier: Apache-2.0
#include "cpu/bias_gradient.h"

#include <cstring>

namespace fovea::cpu {

BiasGradientSums::BiasGradientSums(const Call& call, const View& grad, const PlaneTraits& traits, const Tiles& tiles,
                                   i64 steps, int threads, Arena& arena)
    : call_(&call), grad_(grad), extents_(traits.extents), steps_(steps) {
  if (!grad_) {
    return;
  }
  const math::Rows& rows = call.rows;
  const bool shared = (!extents_.batch1 && rows.batch1 > 1) || (!extents_.batch2 && rows.batch2 > 1) ||
                      (!extents_.head && rows.heads_q > 1) || !extents_.query || !extents_.key;
  how_ = shared ? BiasSum::kAdd : BiasSum::kStore;
  const DType sum_type = call.problem.type == DType::kFp64 ? DType::kFp64 : DType::kFp32;
  in_place_ = how_ == BiasSum::kStore || (grad_.type == sum_type && !grad_.accumulate);
  const bool every_pair =
      !call.problem.banded() && !rows.packed() && !rows.used_q && !rows.used_k && rows.batch() > 0 && rows.heads_q > 0;
  needs_clearing_ = (shared || !every_pair) && !(in_place_ && grad_.accumulate);
  over_queries_ = !extents_.query;
  over_keys_ = !extents_.key;
  element_ = static_cast<i64>(size_of(sum_type));
  planes1_ = extents_.batch1 ? rows.batch1 : 1;
  planes2_ = extents_.batch2 ? rows.batch2 : 1;
  planes_head_ = extents_.head ? rows.heads_q : 1;
  // The gradient's own dimensions are what max_seqlen says, tasks go as far as sequences can.
  queries_ = over_queries_ ? 1 : call.problem.seqlen_q;
  keys_ = over_keys_ ? 1 : call.problem.seqlen_k;
  query_blocks_ = over_queries_ ? 1 : ceil_div(rows.limit_q, tiles.rows);
  key_blocks_ = over_keys_ ? 1 : ceil_div(rows.limit_k, tiles.keys);

  if (!in_place_) {
    sums_ = arena.take<char>(planes() * queries_ * keys_ * element_);
  }
  if (how_ == BiasSum::kAdd) {
    turns_ = arena.take<std::uint32_t>(planes() * key_blocks_ * query_blocks_);
    numbers_ = arena.take<std::uint32_t>(planes() * key_blocks_ * query_blocks_);
    walks_ = arena.take<std::uint32_t>(steps_ * threads);
  }
}

i64 BiasGradientSums::plane_of(i64 b, i64 head) const {
  const i64 b1 = extents_.batch1 ? b / call_->rows.batch2 : 0;
  const i64 b2 = extents_.batch2 ? b % call_->rows.batch2 : 0;
  return (b1 * planes2_ + b2) * planes_head_ + (extents_.head ? head : 0);
}

i64 BiasGradientSums::counter_of(i64 b, i64 head, i64 key_block) const {
  return (plane_of(b, head) * key_blocks_ + (over_keys_ ? 0 : key_block)) * query_blocks_;
}

Matrix BiasGradientSums::plane_matrix(i64 plane, i64 first_row) const {
  const math::Strides& s = grad_.strides;
  const i64 head = plane % planes_head_;
  const i64 b2 = plane / planes_head_ % planes2_;
  const i64 b1 = plane / planes_head_ / planes2_;
  char* data = static_cast<char*>(grad_.data);
  if (data != nullptr) {  // without elements there may be no memory, and then no offset either
    data += (b1 * s.batch1 + b2 * s.batch2 + head * s.head + first_row * s.row) * static_cast<i64>(size_of(grad_.type));
  }
  return {data, static_cast<std::int32_t>(grad_.type), s.row, s.col, grad_.accumulate};
}

Matrix BiasGradientSums::sum_matrix(i64 plane) const {
  if (in_place_) {
    return plane_matrix(plane);
  }
  return {sums_ + plane * queries_ * keys_ * element_, 0, over_queries_ ? 0 : keys_, over_keys_ ? 0 : 1, false};
}

void BiasGradientSums::clear(int threads, const Kernels& kernels, const void* zeros) {
  if (how_ == BiasSum::kAdd) {
    const auto counters = static_cast<std::size_t>(planes() * key_blocks_ * query_blocks_);
    std::fill_n(turns_, counters, 0u);
    std::fill_n(numbers_, counters, 0u);
  }
  if (!needs_clearing_ || keys_ == 0) {
    return;
  }
  const i64 tasks = ceil_div(queries_, kRowsATask);
  for_each_task(threads, planes() * tasks, [&](int, i64 number) {
    const i64 plane = number / tasks;
    const i64 first = number % tasks * kRowsATask;
    const i64 rows = std::min(kRowsATask, queries_ - first);
    if (in_place_) {
      kernels.store(zeros, 0, plane_matrix(plane, first), rows, keys_);
    } else {
      std::memset(sums_ + (plane * queries_ + first) * keys_ * element_, 0,
                  static_cast<std::size_t>(rows * keys_ * element_));
    }
  });
}

void BiasGradientSums::number_walk(int thread, i64 b, i64 first_head, i64 key_block, i64 first_block, i64 blocks,
                                   i64 begin, i64 end) {
  if (how_ != BiasSum::kAdd) {
    return;
  }
  std::uint32_t* walk = walks_ + steps_ * thread;
  for (i64 step = begin; step < end; ++step) {
    std::uint32_t* numbers = numbers_ + counter_of(b, first_head + step / blocks, key_block);
    if (!over_queries_) {
      *walk++ = numbers[first_block + step % blocks]++;
    } else if (step == begin || step % blocks == 0) {  // once for a head
      *walk++ = numbers[0]++;
    }
  }
}

BiasGradient BiasGradientSums::of_head(int thread, i64 b, i64 head, i64 key_block) const {
  if (!grad_) {
    return {};
  }
  BiasGradient gradient{how_, sum_matrix(plane_of(b, head)), over_queries_, over_keys_, nullptr, nullptr};
  if (how_ == BiasSum::kAdd) {
    gradient.turns = turns_ + counter_of(b, head, key_block);
    gradient.numbers = walks_ + steps_ * thread;
  }
  return gradient;
}

void BiasGradientSums::finish(int threads, const Kernels& kernels) {
  if (in_place_ || keys_ == 0) {
    return;
  }
  const i64 tasks = ceil_div(queries_, kRowsATask);
  for_each_task(threads, planes() * tasks, [&](int, i64 number) {
    const i64 plane = number / tasks;
    const i64 first = number % tasks * kRowsATask;
    kernels.store(sums_ + (plane * queries_ + first) * keys_ * element_, keys_, plane_matrix(plane, first),
                  std::min(kRowsATask, queries_ - first), keys_);
  });
}

}  // namespace fovea::cpu
