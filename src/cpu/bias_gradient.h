// SPDX-License-Identifier: Apache-2.0
//
// The gradient of one bias, in the shape the bias was given in. Where every element belongs to one task it is stored;
// otherwise contributions are added in the accumulation type, into the gradient itself if that has this type, else
// into sums of the gradient's own size that are rounded at the end. Contributions to a tile (plane, query block, key
// block) are numbered as tickets are handed out, which fixes their order.
#pragma once

#include "cpu/schedule.h"

namespace fovea::cpu {

class BiasGradientSums {
 public:
  BiasGradientSums() = default;
  // Takes its memory from the arena, for `threads` walks of `steps` steps.
  BiasGradientSums(const Call& call, const View& grad, const PlaneTraits& traits, const Tiles& tiles, i64 steps,
                   int threads, Arena& arena);

  explicit operator bool() const { return static_cast<bool>(grad_); }

  // Clears the memory that tasks will add to, and the elements that no task may write; `zeros` is a row of zeros,
  // zero_columns() long.
  void clear(int threads, const Kernels& kernels, const void* zeros);

  i64 zero_columns() const { return grad_ && in_place_ ? keys_ : 0; }

  // Numbers the contributions of a walk: steps [begin, end) over (head of the group, query block from `first_block`).
  void number_walk(int thread, i64 b, i64 first_head, i64 key_block, i64 first_block, i64 blocks, i64 begin, i64 end);

  // For the kernel: the walk that `thread` numbered last.
  BiasGradient of_head(int thread, i64 b, i64 head, i64 key_block) const;

  // Rounds the sums.
  void finish(int threads, const Kernels& kernels);

 private:
  static constexpr i64 kRowsATask = 64;

  i64 plane_of(i64 b, i64 head) const;
  i64 counter_of(i64 b, i64 head, i64 key_block) const;
  i64 planes() const { return planes1_ * planes2_ * planes_head_; }
  Matrix plane_matrix(i64 plane, i64 first_row = 0) const;
  Matrix sum_matrix(i64 plane) const;

  const Call* call_ = nullptr;
  View grad_;
  Extents extents_;
  BiasSum how_ = BiasSum::kNone;
  bool in_place_ = false;
  bool needs_clearing_ = false;
  bool over_queries_ = false;
  bool over_keys_ = false;
  i64 element_ = 0;  // bytes of the accumulation type
  i64 planes1_ = 0, planes2_ = 0, planes_head_ = 0;
  i64 queries_ = 0, keys_ = 0;  // of a plane
  i64 query_blocks_ = 0, key_blocks_ = 0;
  i64 steps_ = 0;
  char* sums_ = nullptr;
  std::uint32_t* turns_ = nullptr;    // by plane, key block, query block
  std::uint32_t* numbers_ = nullptr;  // contributions numbered so far, likewise
  std::uint32_t* walks_ = nullptr;    // by thread and step
};

}  // namespace fovea::cpu
