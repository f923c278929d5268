// SPDX-License-Identifier: Apache-2.0
//
// What a processor and its operating system can run. GCC's and Clang's __builtin_cpu_supports says much the same of
// x86-64, but its data are in each compiler's own run-time library, and zig's has none; Clang 14 does not know all the
// names. Of aarch64 Linux says it.
#pragma once

#include <cstdint>

namespace fovea::cpu {

// What the instructions cpuid and xgetbv return; 0 where the processor has no such leaf.
struct Cpuid {
  std::uint32_t leaf0_ebx = 0;  // the first letters of the vendor's name
  std::uint32_t leaf1_ecx = 0;
  std::uint32_t leaf7_ebx = 0;
  std::uint32_t leaf7_edx = 0;
  std::uint32_t leaf7_1_eax = 0;
  std::uint64_t xcr0 = 0;  // which registers the operating system saves; 0 without OSXSAVE

  static Cpuid of_this_machine();

  // The flags that src/CMakeLists.txt compiles the instruction set with, each of them, as the compiler may use it
  // anywhere; and that the operating system saves the registers.
  [[nodiscard]] bool sse4() const;
  [[nodiscard]] bool avx2() const;
  [[nodiscard]] bool avx512() const;
  [[nodiscard]] bool avx512_bf16() const;
  [[nodiscard]] bool amx() const;  // tiles and products of bf16

  // Whether a product of 16 pairs of bf16 takes as long as one of 16 numbers of fp32: on AMD's, since Zen 4. Intel's
  // begin one in the time of two, so there bf16 is multiplied no faster than fp32, but rounded more often.
  [[nodiscard]] bool has_fast_bf16() const;
};

// What Linux tells a process on aarch64: AT_HWCAP and AT_HWCAP2 of its auxiliary vector.
struct Hwcap {
  std::uint64_t hwcap = 0;
  std::uint64_t hwcap2 = 0;

  static Hwcap of_this_machine();

  // Products of bf16, and whatever else src/CMakeLists.txt lets the compiler use beside them.
  [[nodiscard]] bool neon_bf16() const;
};

// Linux lets a process use the data of AMX's registers only if it asks, since it then saves 8 KiB more for each thread:
// whether it may. Says no where signals have stacks too small for that.
bool ask_for_amx();

// Whether Linux has that at all. Only a system that cannot say so is asked for it.
bool system_knows_amx();

}  // namespace fovea::cpu
