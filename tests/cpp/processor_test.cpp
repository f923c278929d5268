// SPDX-License-Identifier: Apache-2.0
//
// Which instruction sets a processor and its operating system can run, from the bits of cpuid and xgetbv, and from
// those that Linux gives a process on aarch64.
#include "cpu/processor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/schedule.h"

namespace fovea::cpu {
namespace {

// The numbers of Linux's asm/hwcap.h: ASIMD, CRC32, ATOMICS, ASIMDRDM; of AT_HWCAP2: BF16.
TEST(Processor, ProductsOfBf16OnArm) {
  const std::vector<int> needed = {1, 7, 8, 12};
  constexpr std::uint64_t kBf16 = std::uint64_t{1} << 14;
  const Hwcap all{~std::uint64_t{0}, ~std::uint64_t{0}};
  EXPECT_TRUE(all.neon_bf16());
  EXPECT_FALSE(Hwcap().neon_bf16());
  Hwcap least{0, kBf16};
  for (const int n : needed) {
    EXPECT_FALSE((Hwcap{all.hwcap & ~(std::uint64_t{1} << n), all.hwcap2}.neon_bf16())) << "AT_HWCAP, bit " << n;
    least.hwcap |= std::uint64_t{1} << n;
  }
  EXPECT_TRUE(least.neon_bf16()) << "nothing else is needed";
  EXPECT_FALSE((Hwcap{all.hwcap, all.hwcap2 & ~kBf16}.neon_bf16())) << "AT_HWCAP2, BF16";
}

#if defined(__aarch64__)
// Linux's own words for the same bits. (An emulator shows the file of the machine it runs on.)
TEST(Processor, AgreesWithLinux) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> features;
  for (std::string line; features.empty() && std::getline(file, line);) {
    if (line.starts_with("Features")) {
      std::istringstream words(line.substr(line.find(':') + 1));
      for (std::string word; words >> word;) {
        features.insert(word);
      }
    }
  }
  if (features.empty()) {
    GTEST_SKIP() << "/proc/cpuinfo has no features";
  }
  bool expected = true;
  for (const char* name : {"asimd", "crc32", "atomics", "asimdrdm", "bf16"}) {
    expected = expected && features.contains(name);
  }
  EXPECT_EQ(Hwcap::of_this_machine().neon_bf16(), expected);
}
#endif

#if defined(__x86_64__)
constexpr std::uint32_t bit(int n) { return std::uint32_t{1} << static_cast<unsigned>(n); }

// A processor with everything, on an operating system that saves all registers. The numbers are the manual's.
const std::vector<int> kLeaf1Sse4 = {0, 9, 19, 20, 23};       // SSE3, SSSE3, SSE4.1, SSE4.2, POPCNT
const std::vector<int> kLeaf1 = {1, 12, 23, 25, 27, 28, 29};  // PCLMULQDQ, FMA, POPCNT, AES, OSXSAVE, AVX, F16C
const std::vector<int> kLeaf7 = {3, 5, 8};                    // BMI, AVX2, BMI2
const std::vector<int> kLeaf7Wide = {16, 17, 28, 30, 31};     // AVX-512 F, DQ, CD, BW, VL
const std::vector<int> kLeaf7Tiles = {22, 24};                // of edx: AMX-BF16, AMX-TILE
Cpuid everything() {
  constexpr std::uint32_t kAll = ~std::uint32_t{0};
  return {kAll, kAll, kAll, kAll, kAll, 0x600ff};
}

TEST(Processor, EachFeatureIsNeeded) {
  EXPECT_TRUE(everything().avx2());
  EXPECT_TRUE(everything().avx512());
  EXPECT_TRUE(everything().amx());
  EXPECT_FALSE(Cpuid().avx2());
  EXPECT_FALSE(Cpuid().avx512());
  Cpuid oldest;
  for (const int n : kLeaf1Sse4) {
    Cpuid without = everything();
    without.leaf1_ecx &= ~bit(n);
    EXPECT_FALSE(without.sse4()) << "leaf 1, ecx, bit " << n;
    EXPECT_FALSE(oldest.sse4());
    oldest.leaf1_ecx |= bit(n);
  }
  EXPECT_TRUE(oldest.sse4()) << "nothing else is needed";
  Cpuid least;
  for (const int n : kLeaf1) {
    Cpuid without = everything();
    without.leaf1_ecx &= ~bit(n);
    EXPECT_FALSE(without.avx2() || without.avx512()) << "leaf 1, ecx, bit " << n;
    least.leaf1_ecx |= bit(n);
  }
  for (const int n : kLeaf7) {
    Cpuid without = everything();
    without.leaf7_ebx &= ~bit(n);
    EXPECT_FALSE(without.avx2() || without.avx512()) << "leaf 7, ebx, bit " << n;
    least.leaf7_ebx |= bit(n);
  }
  least.xcr0 = 0b111;
  EXPECT_TRUE(least.avx2()) << "nothing else is needed";
  for (const int n : kLeaf7Wide) {
    Cpuid without = everything();
    without.leaf7_ebx &= ~bit(n);
    EXPECT_TRUE(without.avx2());
    EXPECT_FALSE(without.avx512()) << "leaf 7, ebx, bit " << n;
    least.leaf7_ebx |= bit(n);
  }
  EXPECT_FALSE(least.avx512()) << "ZMM registers are not saved";
  least.xcr0 = 0xe7;
  EXPECT_TRUE(least.avx512()) << "nothing else is needed";
  for (const int n : kLeaf7Tiles) {
    Cpuid without = everything();
    without.leaf7_edx &= ~bit(n);
    EXPECT_TRUE(without.avx512());
    EXPECT_FALSE(without.amx()) << "leaf 7, edx, bit " << n;
    least.leaf7_edx |= bit(n);
  }
  Cpuid without = everything();
  without.leaf7_1_eax &= ~bit(5);
  EXPECT_TRUE(without.avx512());
  EXPECT_FALSE(without.avx512_bf16() || without.amx()) << "AVX512-BF16";
  EXPECT_FALSE(least.avx512_bf16());
  least.leaf7_1_eax = bit(5);
  EXPECT_TRUE(least.avx512_bf16()) << "nothing else is needed";
  EXPECT_FALSE(least.amx()) << "tiles are not saved";
  least.xcr0 = 0x600e7;
  EXPECT_TRUE(least.amx()) << "nothing else is needed";
}

// The first word of a vendor's name, as cpuid returns it in ebx.
TEST(Processor, WhoseProductsOfBf16AreFast) {
  const auto word = [](const char(&name)[13]) {
    std::uint32_t first = 0;
    std::memcpy(&first, name, sizeof first);
    return first;
  };
  Cpuid cpuid = everything();
  cpuid.leaf0_ebx = word("AuthenticAMD");
  EXPECT_TRUE(cpuid.has_fast_bf16());
  cpuid.leaf0_ebx = word("GenuineIntel");
  EXPECT_FALSE(cpuid.has_fast_bf16());
  EXPECT_TRUE(cpuid.avx512_bf16()) << "by name";
  cpuid = everything();
  cpuid.leaf0_ebx = word("AuthenticAMD");
  cpuid.leaf7_1_eax = 0;
  EXPECT_FALSE(cpuid.has_fast_bf16()) << "it has no such instruction";
}

// An operating system that does not save a register must not be shown an instruction that uses it.
TEST(Processor, TheOperatingSystemSavesTheRegisters) {
  for (const int n : {1, 2}) {  // XMM, the upper halves of YMM
    Cpuid without = everything();
    without.xcr0 &= ~std::uint64_t{bit(n)};
    EXPECT_FALSE(without.avx2() || without.avx512()) << "XCR0, bit " << n;
  }
  for (const int n : {5, 6, 7}) {  // mask registers, the upper halves of ZMM, ZMM16 to ZMM31
    Cpuid without = everything();
    without.xcr0 &= ~std::uint64_t{bit(n)};
    EXPECT_TRUE(without.avx2());
    EXPECT_FALSE(without.avx512() || without.amx()) << "XCR0, bit " << n;
  }
  for (const int n : {17, 18}) {  // AMX's configuration and data
    Cpuid without = everything();
    without.xcr0 &= ~std::uint64_t{bit(n)};
    EXPECT_TRUE(without.avx512());
    EXPECT_FALSE(without.amx()) << "XCR0, bit " << n;
  }
}

// Linux lists a feature where the processor has it and the kernel saves its registers.
TEST(Processor, AgreesWithLinux) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (line.starts_with("flags")) {
      std::istringstream words(line.substr(line.find(':') + 1));
      for (std::string word; words >> word;) {
        flags.insert(word);
      }
    }
  }
  ASSERT_FALSE(flags.empty()) << "/proc/cpuinfo has no flags";
  const auto all = [&](const std::vector<std::string>& names) {
    return std::all_of(names.begin(), names.end(), [&](const std::string& name) { return flags.contains(name); });
  };
  const bool sse4 = all({"pni", "ssse3", "sse4_1", "sse4_2", "popcnt"});
  const bool avx2 = all({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "pclmulqdq", "aes"});
  const bool avx512 = avx2 && all({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"});
  const bool avx512_bf16 = avx512 && all({"avx512_bf16"});
  const bool amx = avx512_bf16 && all({"amx_tile", "amx_bf16"});
  const Cpuid cpuid = Cpuid::of_this_machine();
  EXPECT_EQ(cpuid.sse4(), sse4);
  EXPECT_EQ(cpuid.avx2(), avx2);
  EXPECT_EQ(cpuid.avx512(), avx512);
  EXPECT_EQ(cpuid.avx512_bf16(), avx512_bf16);
  EXPECT_EQ(cpuid.amx(), amx);
  const std::map<std::string, bool> expected = {{"amx", amx && system_knows_amx()},
                                                {"amx_emulated", avx512},
                                                {"avx512_bf16", avx512_bf16},
                                                {"avx512", avx512},
                                                {"avx2", avx2},
                                                {"sse4", sse4},
                                                {"portable", true}};
  std::map<std::string, bool> sets;
  for (const Isa& set : instruction_sets()) {
    sets[set.name] = set.available;
  }
  EXPECT_EQ(sets, expected);
}

#endif

}  // namespace
}  // namespace fovea::cpu
