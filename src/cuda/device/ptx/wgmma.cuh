// SPDX-License-Identifier: Apache-2.0
//
// wgmma (Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async): 64 rows by 16 to 256 columns, a step of 16
// of the inner dimension. Overloaded by the accumulator's length, so that a kernel names no width:
//
//   wgmma_shared       d (+)= a b^T, both as descriptors of tiles in shared memory whose rows run along the inner
//                      dimension (Q and K); kRowsInside: d (+)= a b, b's rows are the inner dimension (dS and K);
//                      kColumns: a^T for a, a's rows are the inner dimension, too (dS^T and Q)
//   wgmma_registers    d += a b, a in registers as mma has it, b's rows are the inner dimension (P and V)
//
// d is an mma accumulator for each 8 columns: this thread has (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1) of its
// warp's 16 rows, for columns 8 j ... 8 j + 7 in d[4 j] ... d[4 j + 3].
//
// An instruction's text names every register of d, so the text is put together by macros: FOVEA_NAMES_r is the list of
// r names, FOVEA_PLACES_r the operands that they stand for.
#pragma once

#include "cuda/device/ptx/sm80.cuh"

namespace fovea::cuda {

// wgmma.fence: registers and shared memory are as they should be before the first of a group.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group, wgmma.wait_group: all but the newest kPending groups have ended.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler takes these registers for changed here: what reads them stays behind the wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

// ---- tiles and their descriptors (section "Shared Memory Matrix Layout") ----
// The hardware swizzles rows of 128, 64 or 32 bytes (swizzled() in tile/tile.cuh). A pattern repeats after 8 rows.

// The upper word of a descriptor: 8 rows from one pattern to the next, and the swizzle.
constexpr u32 descriptor_high(int row_bytes) {
  return u32(row_bytes * 8 / 16) | (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : 3u) << 30;
}
// The lower one: the address, and (along_rows) how far the next panel of columns is.
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 panel_bytes) {
  return (address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16;
}
__device__ __forceinline__ u64 descriptor(u32 low, u32 high) {
  u64 both;
  asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(high));
  return both;
}

// ---- the instructions ----

// clang-format off
#define FOVEA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FOVEA_NAMES_16 FOVEA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FOVEA_NAMES_24 FOVEA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FOVEA_NAMES_32 FOVEA_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FOVEA_NAMES_40 FOVEA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FOVEA_NAMES_48 FOVEA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FOVEA_NAMES_56 FOVEA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FOVEA_NAMES_64 FOVEA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FOVEA_NAMES_72 FOVEA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FOVEA_NAMES_80 FOVEA_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FOVEA_NAMES_88 FOVEA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FOVEA_NAMES_96 FOVEA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FOVEA_NAMES_104 FOVEA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FOVEA_NAMES_112 FOVEA_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FOVEA_NAMES_120 FOVEA_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FOVEA_NAMES_128 FOVEA_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FOVEA_EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FOVEA_PLACES_8 FOVEA_EIGHT(0)
#define FOVEA_PLACES_16 FOVEA_PLACES_8, FOVEA_EIGHT(8)
#define FOVEA_PLACES_24 FOVEA_PLACES_16, FOVEA_EIGHT(16)
#define FOVEA_PLACES_32 FOVEA_PLACES_24, FOVEA_EIGHT(24)
#define FOVEA_PLACES_40 FOVEA_PLACES_32, FOVEA_EIGHT(32)
#define FOVEA_PLACES_48 FOVEA_PLACES_40, FOVEA_EIGHT(40)
#define FOVEA_PLACES_56 FOVEA_PLACES_48, FOVEA_EIGHT(48)
#define FOVEA_PLACES_64 FOVEA_PLACES_56, FOVEA_EIGHT(56)
#define FOVEA_PLACES_72 FOVEA_PLACES_64, FOVEA_EIGHT(64)
#define FOVEA_PLACES_80 FOVEA_PLACES_72, FOVEA_EIGHT(72)
#define FOVEA_PLACES_88 FOVEA_PLACES_80, FOVEA_EIGHT(80)
#define FOVEA_PLACES_96 FOVEA_PLACES_88, FOVEA_EIGHT(88)
#define FOVEA_PLACES_104 FOVEA_PLACES_96, FOVEA_EIGHT(96)
#define FOVEA_PLACES_112 FOVEA_PLACES_104, FOVEA_EIGHT(104)
#define FOVEA_PLACES_120 FOVEA_PLACES_112, FOVEA_EIGHT(112)
#define FOVEA_PLACES_128 FOVEA_PLACES_120, FOVEA_EIGHT(120)
#define FOVEA_WGMMA_OF_TYPE(N, R, TYPE, A, B, C, D, E, F)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " C ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                       \
               " {" FOVEA_NAMES_##R "}, " A ", " B ", p, 1, 1, " E ", " D ";\n}"                                     \
               : FOVEA_PLACES_##R : "l"(a), "l"(b), "r"(accumulate), "n"(int(kRowsInside)), "n"(int(kColumns)))
#define FOVEA_WGMMA_OF_REGISTERS(N, R, TYPE, INSIDE, A, B, C, D, E, F)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " F ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                       \
               " {" FOVEA_NAMES_##R "}, {" A ", " B ", " C ", " D "}, " E ", p, 1, 1, " INSIDE ";\n}"                \
               : FOVEA_PLACES_##R : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define FOVEA_WGMMA(N, R, A, B, C, D, E, F)                                                                          \
  template <Type kType, bool kRowsInside = false, bool kColumns = false>                                             \
  __device__ __forceinline__ void wgmma_shared(float (&d)[R], u64 a, u64 b, int accumulate) {                        \
    if constexpr (kType == Type::kBf16) {                                                                            \
      FOVEA_WGMMA_OF_TYPE(N, R, "bf16", A, B, C, D, E, F);                                                           \
    } else {                                                                                                         \
      FOVEA_WGMMA_OF_TYPE(N, R, "f16", A, B, C, D, E, F);                                                            \
    }                                                                                                                \
  }                                                                                                                  \
  template <Type kType, bool kRowsInside = true>                                                                     \
  __device__ __forceinline__ void wgmma_registers(float (&d)[R], const u32* a, u64 b, int accumulate = 1) {          \
    if constexpr (kType == Type::kBf16 && kRowsInside) {                                                             \
      FOVEA_WGMMA_OF_REGISTERS(N, R, "bf16", "1", A, B, C, D, E, F);                                                 \
    } else if constexpr (kType == Type::kBf16) {                                                                     \
      FOVEA_WGMMA_OF_REGISTERS(N, R, "bf16", "0", A, B, C, D, E, F);                                                 \
    } else if constexpr (kRowsInside) {                                                                              \
      FOVEA_WGMMA_OF_REGISTERS(N, R, "f16", "1", A, B, C, D, E, F);                                                  \
    } else {                                                                                                         \
      FOVEA_WGMMA_OF_REGISTERS(N, R, "f16", "0", A, B, C, D, E, F);                                                  \
    }                                                                                                                \
  }

FOVEA_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
FOVEA_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
FOVEA_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
FOVEA_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
FOVEA_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
FOVEA_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
FOVEA_WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
FOVEA_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
FOVEA_WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", "%77")
FOVEA_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
FOVEA_WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", "%93")
FOVEA_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
FOVEA_WGMMA(208, 104, "%104", "%105", "%106", "%107", "%108", "%109")
FOVEA_WGMMA(224, 112, "%112", "%113", "%114", "%115", "%116", "%117")
FOVEA_WGMMA(240, 120, "%120", "%121", "%122", "%123", "%124", "%125")
FOVEA_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef FOVEA_WGMMA
#undef FOVEA_WGMMA_OF_REGISTERS
#undef FOVEA_WGMMA_OF_TYPE

// clang-format on

}  // namespace fovea::cuda
