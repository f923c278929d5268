// SPDX-License-Identifier: Apache-2.0
#include "cpu/processor.h"

#if FOVEA_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif FOVEA_ARM
#include <sys/auxv.h>
#endif

namespace fovea::cpu {
namespace {

template <class Bits>
bool all_of(Bits bits, Bits wanted) {
  return (bits & wanted) == wanted;
}

// The bits of Linux's asm/hwcap.h for aarch64.
constexpr std::uint64_t kArmv82 = 0b1'0001'1000'0010;  // ASIMD, CRC32, ATOMICS, ASIMDRDM
constexpr std::uint64_t kHwcap2Bf16 = std::uint64_t{1} << 14;

}  // namespace

bool Hwcap::neon_bf16() const { return all_of(hwcap, kArmv82) && all_of(hwcap2, kHwcap2Bf16); }

#if FOVEA_ARM
Hwcap Hwcap::of_this_machine() { return {getauxval(AT_HWCAP), getauxval(AT_HWCAP2)}; }
#endif

#if FOVEA_X86
namespace {

// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 13.1 to 13.3, 15.2 and 18.2.
constexpr std::uint64_t kSavesYmm = 0b110;        // XMM, and the upper halves of YMM
constexpr std::uint64_t kSavesZmm = 0b1110'0110;  // those, mask registers, the upper halves of ZMM, ZMM16 to ZMM31

constexpr std::uint64_t kSavesTiles = 0b110'0000'0000'0000'0000;  // AMX's configuration and data
constexpr std::uint32_t kAvx512Bf16 = std::uint32_t{1} << 5;
constexpr std::uint32_t kAmxBf16 = std::uint32_t{1} << 22;
constexpr std::uint32_t kAmxTile = std::uint32_t{1} << 24;

std::uint64_t read_xcr0() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

}  // namespace

Cpuid Cpuid::of_this_machine() {
  Cpuid cpuid;
  std::uint32_t eax = 0;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0) {
    cpuid.leaf0_ebx = ebx;
  }
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
    cpuid.leaf1_ecx = ecx;
  }
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    cpuid.leaf7_ebx = ebx;
    cpuid.leaf7_edx = edx;
  }
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    cpuid.leaf7_1_eax = eax;
  }
  if ((cpuid.leaf1_ecx & bit_OSXSAVE) != 0) {  // else the instruction does not exist
    cpuid.xcr0 = read_xcr0();
  }
  return cpuid;
}

// Every operating system of x86-64 saves these registers.
bool Cpuid::sse4() const {
  return all_of<std::uint32_t>(leaf1_ecx, bit_SSE3 | bit_SSSE3 | bit_SSE4_1 | bit_SSE4_2 | bit_POPCNT);
}

bool Cpuid::avx2() const {
  return all_of<std::uint64_t>(xcr0, kSavesYmm) &&
         all_of<std::uint32_t>(leaf1_ecx,
                               bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_PCLMUL | bit_AES | bit_POPCNT) &&
         all_of<std::uint32_t>(leaf7_ebx, bit_AVX2 | bit_BMI | bit_BMI2);
}

bool Cpuid::avx512() const {
  return avx2() && all_of<std::uint64_t>(xcr0, kSavesZmm) &&
         all_of<std::uint32_t>(leaf7_ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL);
}

bool Cpuid::avx512_bf16() const { return avx512() && all_of<std::uint32_t>(leaf7_1_eax, kAvx512Bf16); }

bool Cpuid::has_fast_bf16() const { return avx512_bf16() && leaf0_ebx == signature_AMD_ebx; }

bool Cpuid::amx() const {
  return avx512_bf16() && all_of<std::uint64_t>(xcr0, kSavesTiles) &&
         all_of<std::uint32_t>(leaf7_edx, kAmxTile | kAmxBf16);
}

#if defined(__linux__)
namespace {
// Of Linux's asm/prctl.h, and the number of the tiles' data, as in XCR0.
constexpr long kSupportedStates = 0x1021;    // ARCH_GET_XCOMP_SUPP
constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;
}  // namespace

bool ask_for_amx() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

bool system_knows_amx() {
  std::uint64_t states = 0;
  if (syscall(SYS_arch_prctl, kSupportedStates, &states) != 0) {  // an older system; one in between has both or none
    return ask_for_amx();
  }
  return (states >> kTileData & 1) != 0;
}
#else
bool ask_for_amx() { return false; }
bool system_knows_amx() { return false; }
#endif

#endif
}  // namespace fovea::cpu
