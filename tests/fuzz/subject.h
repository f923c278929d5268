// SPDX-License-Identifier: Apache-2.0
//
// A fovea_problem drawn at random with memory for it: first one that is right, then, if asked for, made wrong in a
// few places. Every tensor lies in guarded memory of its own, against the page before it or the page behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "check/guarded.h"
#include "core/problem.h"
#include "random.h"

namespace fovea::fuzz {

using check::Guarded;

// A tensor of a fovea_problem, and where a subject keeps its elements.
struct Slot {
  Slot(const char* name, const fovea_tensor* fovea_problem::*member, int written_by, std::size_t bytes)
      : name(name), member(member), written_by(written_by), memory(bytes) {}

  const char* name;
  const fovea_tensor* fovea_problem::*member;
  int written_by;  // a fovea_direction, or -1: an input of both
  Guarded memory;
  fovea_tensor tensor{};
  unsigned char* used_begin = nullptr;  // the bytes that the right problem's tensor spans
  unsigned char* used_end = nullptr;
};

class Subject {
 public:
  Subject();

  // A problem that is right. Its size is bounded: at most some ten thousand scores.
  void draw(Random& random, Direction direction);
  // Something is no longer right, or no longer ordinary.
  void spoil(Random& random);

  fovea_problem& problem() { return problem_; }
  Direction direction() const { return direction_; }
  // Whether the numbers are such that two backends must agree: no infinities, no extreme scales.
  bool comparable() const;
  void set_incomparable() { comparable_ = false; }

  // Whether every tensor that the direction uses lies in memory that exists (NULL data does too: it is refused).
  // With lengths_only, of cu_seqlens and seqused alone, which the library reads to check them.
  bool in_memory(bool lengths_only) const;
  // At most so many multiplications does a call make for its scores.
  double work() const;
  // The most workspace that a call may ask for, whatever max_seqlen says.
  double most_workspace() const;

  // The bytes between the first and the last element of each output that lies in memory that exists.
  using Bytes = std::vector<std::vector<unsigned char>>;
  Bytes outputs(Direction direction) const;
  // NaN into all of them.
  void poison(Direction direction);
  bool is_poisoned(Direction direction) const;
  // What is wrong with `found`, given what the reference made of the same problem; "" if nothing.
  std::string difference(Direction direction, const Bytes& found, const Bytes& expected) const;

 private:
  using Ints = std::vector<std::int64_t>;

  Slot& slot(const char* name);
  bool is_used(const Slot& slot) const;
  // A tensor as the library sees it: strides always said, and the bytes that it spans; none if they are not there.
  struct Span {
    const char* name = nullptr;
    fovea_tensor tensor{};
    unsigned char* begin = nullptr;
    unsigned char* end = nullptr;
    bool exists = true;
  };
  Span span_of(const Slot& slot) const;
  std::vector<Span> output_spans(Direction direction) const;
  void lay_out(Random& random, Slot& slot, DType type, const Ints& shape, bool output);
  void place(Random& random, Slot& slot, const Ints& strides);
  void fill(Random& random, Slot& slot, double special);
  void add(Random& random, const char* name, DType type, const Ints& shape, double special = 0);
  void add_plane(Random& random, const char* name, DType type, const Ints& scores);
  template <class Next>
  void add_integers(Random& random, const char* name, DType type, const Ints& shape, Next next);
  void draw_positions(Random& random, std::int64_t batch);
  void accumulate(Random& random, DType type, std::uint64_t bit);
  void add_lengths(Random& random, const char* name, DType type, const Ints& values);
  // Gives a dimension of an input that is 1 another length, in no more memory than before.
  void stretch(const char* name, int dim, std::int64_t length);
  void draw_options(Random& random);
  Ints draw_lengths(Random& random, std::int64_t batch, std::int64_t longest);

  std::deque<Slot> slots_;
  fovea_problem problem_{};
  Direction direction_ = Direction::kForward;
  bool comparable_ = true;
  std::uint64_t seed_value_ = 0;
};

}  // namespace fovea::fuzz
