// SPDX-License-Identifier: Apache-2.0
//
// Which instruction sets a processor and its operating system can run, from the bits of cpuid and xgetbv.
#include "cpu/processor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/schedule.h"

#if defined(__x86_64__)

namespace fovea::cpu {
namespace {

constexpr std::uint32_t bit(int n) { return std::uint32_t{1} << static_cast<unsigned>(n); }

// A processor with everything, on an operating system that saves all registers. The numbers are the manual's.
const std::vector<int> kLeaf1 = {1, 12, 25, 27, 28, 29};   // PCLMULQDQ, FMA, AES, OSXSAVE, AVX, F16C
const std::vector<int> kLeaf7 = {3, 5, 8};                 // BMI, AVX2, BMI2
const std::vector<int> kLeaf7Wide = {16, 17, 28, 30, 31};  // AVX-512 F, DQ, CD, BW, VL
const std::vector<int> kLeaf7Tiles = {22, 24};             // of edx: AMX-BF16, AMX-TILE
Cpuid everything() { return {~std::uint32_t{0}, ~std::uint32_t{0}, ~std::uint32_t{0}, ~std::uint32_t{0}, 0x600ff}; }

TEST(Processor, EachFeatureIsNeeded) {
  EXPECT_TRUE(everything().avx2());
  EXPECT_TRUE(everything().avx512());
  EXPECT_TRUE(everything().amx());
  EXPECT_FALSE(Cpuid().avx2());
  EXPECT_FALSE(Cpuid().avx512());
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
  EXPECT_FALSE(without.amx()) << "AVX512-BF16";
  least.leaf7_1_eax = bit(5);
  EXPECT_FALSE(least.amx()) << "tiles are not saved";
  least.xcr0 = 0x600e7;
  EXPECT_TRUE(least.amx()) << "nothing else is needed";
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
  const bool avx2 = all({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "pclmulqdq", "aes"});
  const bool avx512 = avx2 && all({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"});
  const bool amx = avx512 && all({"avx512_bf16", "amx_tile", "amx_bf16"});
  const Cpuid cpuid = Cpuid::of_this_machine();
  EXPECT_EQ(cpuid.avx2(), avx2);
  EXPECT_EQ(cpuid.avx512(), avx512);
  EXPECT_EQ(cpuid.amx(), amx);
  const std::map<std::string, bool> expected = {
      {"amx", amx}, {"amx_emulated", avx512}, {"avx512", avx512}, {"avx2", avx2}, {"portable", true}};
  std::map<std::string, bool> sets;
  for (const Isa& set : instruction_sets()) {
    sets[set.name] = set.available;
  }
  EXPECT_EQ(sets, expected);
}

}  // namespace
}  // namespace fovea::cpu
#endif
