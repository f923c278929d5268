// SPDX-License-Identifier: Apache-2.0
//
// What counts as right. For every output, in the maximum and in the mean over its elements:
//
//     error against the fp64 reference  <=  2 * (the naive evaluation's error)  +  a small absolute term
//
// naive.h says what the naive evaluation is. The absolute term is kUnits units in the last place of the output's
// type at the size of its largest (mean) element: a naive evaluation may be right by luck. The naive evaluation's
// errors are pseudo-random, and a small problem has few of them, so the worst of kDraws evaluations counts; where that
// is not enough, the worst of kMoreDraws others. Where the reference is infinite or NaN, the result has to be the same.
//
// Weights below the least normal number are 0, so an error of kFlushed is allowed of fp32 (fp64: kFlushedDouble).
//
// On a GPU two things differ. Its tensor cores flush denormal fp32 numbers to zero, so kFlushed is allowed of bf16, too
// (fp16 has a larger error already). And the naive evaluation has the errors of tensor cores and of tanh by exp2
// (naive.h).
//
// A CPU's matrix unit takes denormal operands for 0, so there kFlushed is allowed as well.
#pragma once

#include <string>
#include <vector>

#include "check/materialise.h"

namespace fovea::check {

enum class Arithmetic { kCpu, kCpuWithMatrixUnit, kGpu };

// Naive evaluations of a problem.
constexpr int kDraws = 3;
constexpr int kMoreDraws = 30;

struct Deviation {
  std::string tensor;
  double max_error = 0;
  double max_allowed = 0;
  double mean_error = 0;
  double mean_allowed = 0;
  std::string mismatch;  // an infinity or NaN where there is to be none, or the other way round; "" if none
  bool within() const;
};
std::string to_text(const Deviation& deviation);

// The largest of the two ratios of an error to the allowed error; infinite where there is a mismatch.
double share_of_allowed(const Deviation& deviation);

// `reference` and each of `naive` hold the value of every element of the tensor's buffer.
using Values64 = std::vector<double>;
Deviation compare(const Tensor& actual, const Values64& reference, const std::vector<const Values64*>& naive,
                  Arithmetic arithmetic = Arithmetic::kCpu);

}  // namespace fovea::check
