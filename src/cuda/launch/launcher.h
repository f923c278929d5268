// SPDX-License-Identifier: Apache-2.0
//
// One call's launches: fills the arguments of each kernel and hands them to the driver. Nothing here decides anything.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/around/clear_rows_args.h"
#include "cuda/device/around/prepare_args.h"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/executable.h"

namespace fovea::cuda {

// With FOVEA_CHECK=1 (and outside of a capture): asks where every address lies, waits for the stream, reads cu_seqlens
// and seqused, and throws Error(FOVEA_INVALID_ARGUMENT) as validate() does where those lie on the host.
void check_arguments(const Call& call, const jit::Driver& driver);

class Launcher {
 public:
  Launcher(const Call& call, const Executable& executable, void* workspace);

  void run();

 private:
  const Call& call_;
  const Plan& plan_;
  const std::vector<jit::cu::Kernel>& kernels_;
  const jit::Driver& driver_;
  char* workspace_;
  Args args_;
  std::size_t first_ = 0;  // launch of the plan that this call has

  template <class T>
  T* region(Region region) const {
    return plan_.workspace.has(region) ? reinterpret_cast<T*>(workspace_ + plan_.workspace.offset(region)) : nullptr;
  }
  Tensor tensor(const Operand& operand, const View& view) const;
  Tensor tensor(const View& view) const { return {view.data, view.strides}; }

  // Whether a launch may begin before the one before it in this call has ended, for kernels that wait for that first
  // (begin_kernel). The first of a call comes after work of others.
  bool may_overlap(std::size_t number) const;
  // With one argument. Its own name: a pointer to pointers is a void*, too.
  void launch_with(std::size_t number, std::int64_t blocks, void* arguments);
  // With a pointer for each argument. programmatic: may begin before the launch before it has ended.
  void launch(std::size_t number, std::int64_t blocks, void** parameters, bool programmatic);

  // prepare.cpp
  void pack(std::size_t number);
  void unpack(std::size_t number);
  void mask(std::size_t number);
  void term(std::size_t number);
  void pairs(std::size_t number);
  void clear_rows(std::size_t number);

  // In pieces where there are more blocks than a grid has.
  void main(std::size_t number, Args& args);

  // sm90_forward.cpp
  void sm90_schedule(std::size_t number);
  void sm90_forward(std::size_t number);

  // sm90_backward.cpp
  KeyParts key_parts(const Launch& step) const;
  void sm90_backward_mask(std::size_t number);
  void sm90_backward(std::size_t number);
  void sm90_backward_parts(std::size_t number);

  // generic_forward.cpp, generic_backward.cpp
  void forward(std::size_t number);
  void backward_arguments();
  void backward_prepare(std::size_t number);
  void bias_gradient(std::size_t number);
  void bias_gradient_arguments(const Launch& step);

  // sm90_bias_gradient.cpp, sm90_small_backward.cpp
  void sm90_bias_gradient(std::size_t number);
  void sm90_small_backward(std::size_t number);
};

}  // namespace fovea::cuda
