// SPDX-License-Identifier: Apache-2.0
//
// One call's launches. What each kernel's arguments are, the file of src/cuda/kernels knows that planned its launch;
// here is what they share. Nothing here decides anything. The way of a launch: run() calls Launch::start, a function of
// that file, which fills the arguments and calls launch(), which puts the kernel on the stream.
#pragma once

#include "cuda/device/args.h"
#include "cuda/executable.h"

namespace fovea::cuda {

// For FOVEA_CHECK=1, and outside of a capture alone: asks where every address lies, waits for the stream, reads
// cu_seqlens and seqused, and throws Error(FOVEA_INVALID_ARGUMENT) as validate() does where those lie on the host.
void check_arguments(const Call& call, const jit::Driver& driver);

class Launcher {
 public:
  Launcher(const Call& call, const Executable& executable, void* workspace);

  void run() const;

  const Call& call() const { return call_; }
  const Operands& operands() const { return plan_.operands; }
  const jit::Driver& driver() const { return driver_; }
  // Of every kernel that has Args.
  const Args& args() const { return args_; }

  // Null where the plan has no such region.
  template <class T>
  T* region(Region region) const {
    return plan_.workspace.has(region) ? reinterpret_cast<T*>(workspace_ + plan_.workspace.offset(region)) : nullptr;
  }
  Tensor tensor(const Operand& operand, const View& view) const;
  static Tensor tensor(const View& view) { return {view.data, view.strides}; }

  // Arguments, one or two: any structs that the kernel takes. The launch may begin before the one before it in this
  // call has ended: all our kernels wait for that first (begin_kernel).
  template <class... T>
  void launch(const Launch& launch, const T&... arguments) const {
    void* parameters[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};  // which cuLaunchKernel reads
    enqueue(launch, launch.blocks, parameters);
  }
  // In pieces where there are more blocks than a grid has: a kernel that counts from Args::first_block.
  void launch_in_pieces(const Launch& launch, Args args) const;

 private:
  const Call& call_;
  const Plan& plan_;
  const std::vector<jit::cu::Kernel>& kernels_;
  const jit::Driver& driver_;
  char* workspace_;
  Args args_;
  std::size_t first_ = 0;  // launch of the plan that this call has

  void backward_arguments();
  void enqueue(const Launch& launch, std::int64_t blocks, void** parameters) const;
};

}  // namespace fovea::cuda
