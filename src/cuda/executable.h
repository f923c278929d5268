// SPDX-License-Identifier: Apache-2.0
//
// A plan with its kernels as the driver knows them.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "cuda/cuda.h"
#include "cuda/jit/jit.h"

namespace fovea::cuda {

jit::Request request_of(const Kernel& kernel, const Target& target);

class Executable {
 public:
  Executable(Plan plan, const jit::DeviceInfo& device) : plan_(std::move(plan)), device_(device) {}

  const Plan& plan() const { return plan_; }
  const jit::DeviceInfo& device() const { return device_; }

  bool loaded() const { return loaded_.load(std::memory_order_acquire); }
  void load();  // of threads that come at once, one loads and the others wait
  const std::vector<jit::cu::Kernel>& kernels() const { return kernels_; }  // a launch each, once loaded

 private:
  const Plan plan_;
  const jit::DeviceInfo& device_;
  std::mutex mutex_;
  std::atomic<bool> loaded_ = false;
  std::vector<jit::cu::Kernel> kernels_;
};

}  // namespace fovea::cuda
