// SPDX-License-Identifier: Apache-2.0
//
// Compiled once for each instruction set, with its flags and -DFOVEA_ISA=<its name>: the table of kernels that
// cpu/dispatch.cpp chooses from. Everything here lives in namespaces of that name, and nothing of the standard
// library is instantiated, so that no symbol of this object can stand in for another's.
#include "cpu/kernels.h"

#include "cpu/isa/backward.h"
#include "cpu/isa/forward.h"
#include "cpu/isa/prepare.h"

#define FOVEA_STRING_OF(name) #name
#define FOVEA_NAME_OF(macro) FOVEA_STRING_OF(macro)

namespace fovea::cpu::FOVEA_ISA {
namespace {

constexpr char kName[] = FOVEA_NAME_OF(FOVEA_ISA);

template <class Operands>
void run_forward(const ForwardTask& task, void* scratch) {
  __atomic_store_n(task.options->ran, static_cast<const char*>(kName), __ATOMIC_RELAXED);
  using Rows = RowsForward<typename Operands::Number>;
  Rows::takes(task) ? forward<Rows>(task, scratch) : forward<Operands>(task, scratch);
}

template <class Operands>
size_t forward_scratch(const Options& options) {
  const size_t blocks = scratch_of_forward<Operands>(options);
  const size_t rows = scratch_of_forward<RowsForward<typename Operands::Number>>(options);
  return blocks < rows ? rows : blocks;
}

template <class Operands>
void run_backward(const BackwardTask& task, void* scratch) {
  __atomic_store_n(task.options->ran, static_cast<const char*>(kName), __ATOMIC_RELAXED);
  backward<Operands>(task, scratch);
}

template <class T>
void store(const void* from, i64 stride, const Matrix& to, i64 rows, i64 cols) {
  for (i64 row = 0; row < rows; ++row) {
    store_row(static_cast<const T*>(from) + row * stride, to, row, 0, cols);
  }
}

template <class ForwardOperands, class BackwardOperands>
constexpr Kernels table(const Shape& shape) {
  using T = typename ForwardOperands::Number;
  return {kName,
          shape,
          lanes<T>(),
          forward_scratch<ForwardOperands>,
          forward_partial<T>,
          run_forward<ForwardOperands>,
          forward_merge<T>,
          prepare<BackwardOperands>,
          backward_scratch<BackwardOperands>,
          sum_q_stride<T>,
          sum_kv<T>,
          run_backward<BackwardOperands>,
          store<T>};
}

}  // namespace

#ifdef FOVEA_MATRIX_UNIT
const Kernels bf16_kernels = table<UnitForward, UnitBackward>({2, 32, 32, 256, 256, 256});
#else
// 48 rows are strips of 12 and groups of 16.
const Kernels kernels[2] = {table<VectorForward<float>, VectorBackward<float>>({4, 48, 16, 512, 96, 256}),
                            table<VectorForward<double>, VectorBackward<double>>({8, 48, 16, 512, 96, 256})};
#endif

}  // namespace fovea::cpu::FOVEA_ISA
