// SPDX-License-Identifier: Apache-2.0
//
// validate() as an object: what was given and the Call that comes of it. Its steps stand in one file for each topic:
//
//     validate.cpp          structs, header, options, memory, seeds; the order of all steps
//     validate_shapes.cpp   shapes and lengths; the name of the layout
//     validate_positions.cpp  positions, and the streams of dropout
//     validate_planes.cpp   what is added to scores: bias, bias2, mask, alibi_slopes, sink
//     validate_results.cpp  out, lse, gradients
#pragma once

#include "core/given.h"
#include "core/problem.h"

namespace fovea {

// Positions of first rows, where `values`, if there are any, are added to `first`. rows: the most of a sequence.
void check_positions(char side, std::int64_t first, const Ints& values, bool dropout, std::int64_t rows);

class Validator {
 public:
  Validator(const fovea_problem& given, Direction direction, bool shapes_only)
      : given_(given), shapes_only_(shapes_only), backward_(direction == Direction::kBackward) {
    problem_.direction = direction;
  }

  // `workspace`: the memory that the call works in; none, where it is only planned.
  Call run(const void* workspace, std::size_t bytes);

 private:
  bool readable() const { return given_.device == FOVEA_CPU; }
  void storage(const char* name, const fovea_tensor& tensor) const { storage_of(name, tensor, shapes_only_); }

  // ---- validate.cpp ----

  void header();
  void options();
  DType accumulator() const;
  void seeds();
  void memory(const void* workspace, std::size_t bytes) const;

  // ---- validate_shapes.cpp ----

  void shapes();
  void dense_batch();
  void packed_batch();
  View rows_view(const fovea_tensor& tensor) const;
  math::Lengths lengths_view(const fovea_tensor& tensor);
  void lengths();
  Ints cu_seqlens(const char* name, const math::Lengths& cu, const char* total_name, std::int64_t total) const;
  std::int64_t longest(const char* name, std::int64_t given, const char* of, std::int64_t total,
                       const math::Lengths& cu, const Ints& lengths, const Ints& used) const;
  math::Lengths seqused(const char* name, const fovea_tensor& tensor, const Ints& lengths, std::int64_t longest,
                        Ints& values);
  Layout layout() const;

  // ---- validate_positions.cpp ----

  void positions();
  void without_positions() const;
  math::Lengths position_tensor(const char* name, const fovea_tensor* tensor, Ints& values);
  void streams();

  // ---- validate_planes.cpp ----

  void planes();
  View plane(const char* name, const fovea_tensor& tensor, PlaneTraits& traits) const;
  void vectors();
  const char* accumulator_hint() const;
  View sink_view(const char* name, const fovea_tensor& tensor) const;

  // ---- validate_results.cpp ----

  // `wide`: fp32 is accepted where q has 16 bits, and said there.
  View like(const char* name, const fovea_tensor& tensor, const fovea_tensor& model, std::int64_t last,
            const char* names, bool* wide) const;
  View lse_view(const char* name, const fovea_tensor& tensor) const;
  void results();
  View grad_plane(const char* name, const fovea_tensor& gradient, const char* of, const fovea_tensor* tensor,
                  bool& wide) const;
  void accumulate();

  const fovea_problem& given_;
  const bool shapes_only_;
  const bool backward_;
  Call call_;
  Problem& problem_ = call_.problem;
};

}  // namespace fovea
