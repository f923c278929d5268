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

  // Whether the kernels are compiled (or read), and loaded into this context of the device.
  bool loaded(jit::cu::Context context);
  bool compiled() const { return last_.load(std::memory_order_acquire) != nullptr; }
  // Into the context of the scope. Of threads that come at once, one loads and the others wait.
  void load(const jit::ContextScope& scope);
  const std::vector<jit::cu::Kernel>& kernels() const { return kernels_; }  // a launch each, once loaded

 private:
  const Plan plan_;
  const jit::DeviceInfo& device_;
  std::mutex mutex_;
  std::vector<jit::cu::Kernel> kernels_;
  std::vector<jit::cu::Context> contexts_;        // that they are loaded into: of most processes one
  std::atomic<jit::cu::Context> last_ = nullptr;  // of these, that of the last call
};

}  // namespace fovea::cuda
