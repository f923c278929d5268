// SPDX-License-Identifier: Apache-2.0
//
// What an x86-64 processor and its operating system can run. GCC's and Clang's __builtin_cpu_supports says much the
// same, but its data are in each compiler's own run-time library, and zig's has none; Clang 14 does not know all the
// names.
#pragma once

#include <cstdint>

namespace fovea::cpu {

// What the instructions cpuid and xgetbv return; 0 where the processor has no such leaf.
struct Cpuid {
  std::uint32_t leaf1_ecx = 0;
  std::uint32_t leaf7_ebx = 0;
  std::uint32_t leaf7_edx = 0;
  std::uint32_t leaf7_1_eax = 0;
  std::uint64_t xcr0 = 0;  // which registers the operating system saves; 0 without OSXSAVE

  static Cpuid of_this_machine();

  // The flags that src/CMakeLists.txt compiles the instruction set with, each of them, as the compiler may use it
  // anywhere; and that the operating system saves the registers.
  [[nodiscard]] bool avx2() const;
  [[nodiscard]] bool avx512() const;
  [[nodiscard]] bool amx() const;  // tiles and products of bf16
};

// Linux lets a process use the data of AMX's registers only if it asks, since it then saves 8 KiB more for each thread:
// whether it may. Says no where signals have stacks too small for that.
bool ask_for_amx();

}  // namespace fovea::cpu
