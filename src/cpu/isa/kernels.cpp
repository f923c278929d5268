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

template <class T>
void run_forward(const ForwardTask& task, void* scratch) {
  __atomic_store_n(task.options->ran, static_cast<const char*>(kName), __ATOMIC_RELAXED);
  forward<T>(task, scratch);
}

template <class T>
void run_backward(const BackwardTask& task, void* scratch) {
  __atomic_store_n(task.options->ran, static_cast<const char*>(kName), __ATOMIC_RELAXED);
  backward<T>(task, scratch);
}

template <class T>
void store(const void* from, i64 stride, const Matrix& to, i64 rows, i64 cols) {
  for (i64 row = 0; row < rows; ++row) {
    store_row(static_cast<const T*>(from) + row * stride, to, row, 0, cols);
  }
}

template <class T>
constexpr Kernels table() {
  return {kName,      lanes<T>(),          forward_scratch<T>, forward_partial<T>, run_forward<T>,  forward_merge<T>,
          prepare<T>, backward_scratch<T>, sum_q_stride<T>,    sum_kv<T>,          run_backward<T>, store<T>};
}

}  // namespace

const Kernels kernels[2] = {table<float>(), table<double>()};

}  // namespace fovea::cpu::FOVEA_ISA
