// SPDX-License-Identifier: Apache-2.0
//
// A trial's calls on a GPU. All tensors of a case and the workspace are copied into one block of device memory and
// back. Between them, and behind the last, every byte is 0xFF, which is a NaN: a read beyond a tensor is seen in the
// result, and after the call all bytes outside of the outputs and the workspace must be as before.
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "check/materialise.h"
#include "cuda/jit/driver.h"

namespace fovea::check {

// One direction of a problem whose tensors and workspace are in the memory of the GPU.
struct GpuCall {
  const fovea_problem& problem;
  Direction direction;
  void* workspace;
  std::size_t workspace_bytes;
};

// fovea_forward() or fovea_backward(). Throws Error with fovea_last_error().
void call_on_gpu(const GpuCall& call);

// For any number of threads: compilation runs at the same time, the calls one after another.
class Gpu {
 public:
  // Called with the lock held, before and after a call on the GPU: for a time limit.
  struct Watch {
    std::function<void()> begin = [] {};
    std::function<void(bool threw)> end = [](bool) {};
  };

  // Throws Error(FOVEA_UNSUPPORTED) where there is no driver or GPU, Error(FOVEA_INVALID_ARGUMENT) for a number that no
  // GPU has.
  explicit Gpu(int ordinal);

  const cuda::jit::DeviceInfo& info() const { return info_; }

  // Compiles and loads the kernels, computes, and copies the outputs back into `tensors`, which are prepared for the
  // direction. Returns a forbidden write, or "". Throws Error as the library and the driver do.
  std::string run(const Tensors& tensors, Direction direction, const Watch& watch) const {
    return run(tensors, direction, watch, call_on_gpu);
  }
  // The same with another function that computes, for tests without a GPU.
  std::string run(const Tensors& tensors, Direction direction, const Watch& watch,
                  const std::function<void(const GpuCall&)>& compute) const;

 private:
  const cuda::jit::Driver& driver_;
  cuda::jit::DeviceInfo info_;
  mutable std::mutex mutex_;
};

// The case as a GPU can compute it: fp64, which no GPU kernel has, becomes fp32; the names of device and backend go.
Case for_gpu(Case c);

}  // namespace fovea::check
