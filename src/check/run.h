// SPDX-License-Identifier: Apache-2.0
//
// A case in its four modes, each through the public C functions, so that these are tested as well:
//
//   test       forward and backward against the fp64 reference, outputs' surroundings untouched   Trial::test
//   gradient   the case in fp64: every gradient against finite differences of the forward         gradient()
//   bench      the time of one call                                                               bench()
//   support    which backend is used, and why not the others                                      support()
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases.h"
#include "check/materialise.h"
#include "check/tolerance.h"
#include "dispatch/plan.h"

namespace fovea::check {

struct Outcome {
  std::string error;               // what went wrong before there was something to compare; "" if nothing did
  fovea_status status = FOVEA_OK;  // that the library ended with
  std::vector<Deviation> deviations;
  bool passed() const;
};
// One line a fault; "" if there is none.
std::string to_text(const Outcome& outcome);

// A case with its memory and its right results: made once, tested on each instruction set.
class Trial {
 public:
  explicit Trial(const Case& c, Arithmetic arithmetic = Arithmetic::kCpu);

  // One direction on tensors that are prepared for it; returns a forbidden write, or "".
  using Run = std::function<std::string(const Tensors& tensors, Direction direction)>;
  Outcome test(const Run& run) const;
  // On the CPU. backend: "" is the best, as everywhere.
  Outcome test(const std::string& backend) const;
  // The same run without comparing: the bytes of every output of both directions, one after another.
  std::vector<std::uint8_t> bytes(const std::string& backend) const;

 private:
  using Wide = std::map<const Tensor*, std::vector<double>>;

  void compute_reference(Direction direction);
  // Naive evaluation number `draw`, into `wide`.
  void evaluate(Direction direction, int draw, Wide& wide) const;
  Deviation compare_with(const std::vector<Wide>& naive, const Tensor& tensor) const;
  Call wide_call(Direction direction, Wide& wide) const;
  void give_saved() const;

  Case case_;
  Arithmetic arithmetic_;
  Tensors tensors_;
  Wide reference_;
  std::vector<Wide> naive_;  // a draw each
};

// Throws Error with fovea_last_error().
void require(fovea_status status);

// One direction of a problem with its workspace, for any number of calls. The memory that the problem points to must
// outlive it.
class Caller {
 public:
  Caller(const fovea_problem& problem, Direction direction);
  void operator()();
  Buffer& workspace() { return workspace_; }

 private:
  fovea_problem problem_;
  Direction direction_;
  Buffer workspace_;
};

// Runs one direction on the tensors of a case. Throws as require() does, or if the library wrote outside its workspace.
void call_library(const fovea_problem& problem, Direction direction, const std::string& backend);

Outcome gradient(const Case& c, const std::string& backend);

// Floating-point operations of allowed (query, key) pairs alone, two for each multiply-add: forward 2 products of
// rows, backward 5. A mask tensor is not looked into.
double flops(const Problem& problem, Direction direction);

struct Timing {
  double seconds = 0;  // the least of the repetitions
  double flops = 0;
};
// Repeats until `seconds` have gone by, twice at least.
Timing bench(const Case& c, Direction direction, const std::string& backend, double seconds);

std::vector<Verdict> support(const Case& c, Direction direction);

}  // namespace fovea::check
