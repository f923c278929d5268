// SPDX-License-Identifier: Apache-2.0
//
// What the case table does not reach in the CPU backend: that no object of an instruction set lends its code to
// another; conversions and exponentials on every instruction set, value by value; threads: none before there is work
// for them, a forked child's own, calls from several threads at once, affinity.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check/guarded.h"
#include "check/run.h"
#include "core/element.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cpu/cpu.h"
#include "cpu/schedule.h"
#include "environment_variable.h"
#include "instruction_sets.h"

namespace fovea {
namespace {

using testing::available_isas;
using testing::ForcedIsa;

// A product that is rounded before it is added to.
bool without_fma(const std::string& isa) { return isa == "portable" || isa == "sse4"; }

// Whether bf16 that is denormal counts as 0.
bool flushes_denormals(const std::string& isa) { return isa == "amx" || isa == "avx512_bf16" || isa == "neon_bf16"; }

void run(const check::Tensors& tensors, Direction direction) {
  check::call_library(tensors.problem(direction), direction, "cpu");
}

check::Case case_of(const std::string& line) {
  check::Case c;
  c.problem = parse(line);
  c.seed = 1;
  return c;
}

// ---- the objects ----

// A function that may be merged with its namesakes of other objects ("weak") must say its instruction set in its name:
// the linker keeps one, and it might be the one with AVX-512 in it.
TEST(CpuTest, NoObjectLendsItsCodeToAnother) {
#if !defined(NDEBUG) || defined(FOVEA_SANITIZED)
  GTEST_SKIP() << "Highway's own inline functions or a sanitizer's data are in the objects; what ships is optimised";
#endif
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    const std::string object =
        std::string(FOVEA_BUILD_DIR) + "/src/CMakeFiles/fovea_cpu_" + isa.name + ".dir/cpu/isa/kernels.cpp.o";
    ASSERT_TRUE(std::filesystem::exists(object)) << object;
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> names(
        popen(("nm -C --defined-only '" + object + "'").c_str(), "r"), pclose);
    ASSERT_NE(names, nullptr);
    std::array<char, 4096> line{};
    int own = 0;
    while (std::fgets(line.data(), line.size(), names.get()) != nullptr) {
      const std::string text(line.data());
      const std::size_t type = text.find_first_of("WVuwv", 17);
      if (type != 17) {
        continue;
      }
      const bool named = text.find("fovea::cpu::" + isa.name + "::") != std::string::npos ||
                         text.find("fovea::math::" + isa.name + "::") != std::string::npos;
      EXPECT_TRUE(named) << isa.name << ": " << text;
      own += named ? 1 : 0;
    }
    EXPECT_GT(own, 0) << "nm says nothing about " << object;
  }
}

#if defined(__x86_64__)
// The text of an object's instructions.
std::string disassembled(const std::string& isa) {
  const std::string object =
      std::string(FOVEA_BUILD_DIR) + "/src/CMakeFiles/fovea_cpu_" + isa + ".dir/cpu/isa/kernels.cpp.o";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> text(
      popen(("objdump -d --no-show-raw-insn '" + object + "'").c_str(), "r"), pclose);
  std::string all;
  std::array<char, 65536> part{};
  for (std::size_t n = 0; text != nullptr && (n = std::fread(part.data(), 1, part.size(), text.get())) > 0;) {
    all.append(part.data(), n);
  }
  return all;
}

// An object that runs where a processor has its instruction set must have no instruction of a later one.
TEST(CpuTest, ObjectsHaveTheirOwnInstructionsAlone) {
#if !defined(NDEBUG) || defined(FOVEA_SANITIZED)
  GTEST_SKIP() << "a sanitizer's code and other inline functions are in the objects; what ships is optimised";
#endif
  using Words = std::vector<const char*>;
  const Words tiles = {"\ttdp", "\ttile", "\tldtilecfg"};
  const Words bf16 = {"\tvdpbf16ps", "\tvcvtne"};
  const Words fp16 = {"ph\t", "ph %", "sh %"};
  const Words wide = {"%zmm", "%k1"};
  const Words sse4 = {"\tpopcnt", "\tpshufb", "\tpmulld", "\tblendv", "\tround", "\tpblend", "\tptest", "\tpmovzx"};
  struct {
    const char* isa;
    std::vector<Words> never;
    Words always;
  } const objects[] = {
      {"portable", {sse4, {"%ymm", "\tv"}, wide}, {"\tmul"}},
      {"sse4", {{"%ymm", "\tv"}, wide}, {"\tblendv", "\tmulps"}},
      {"avx2", {wide, bf16, tiles}, {"\tvfmadd", "%ymm"}},
      {"avx512", {bf16, fp16, tiles}, {"\tvfmadd", "%zmm"}},
      {"avx512_bf16", {fp16, tiles}, {"\tvdpbf16ps"}},
      {"amx", {fp16}, {"\ttdpbf16ps"}},
      {"amx_emulated", {bf16, fp16, tiles}, {"%zmm"}},
  };
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    const auto* const object =
        std::find_if(std::begin(objects), std::end(objects), [&](const auto& one) { return isa.name == one.isa; });
    ASSERT_NE(object, std::end(objects)) << isa.name;
    const std::string text = disassembled(isa.name);
    for (const Words& words : object->never) {
      for (const char* word : words) {
        EXPECT_EQ(text.find(word), std::string::npos) << isa.name << " has " << word;
      }
    }
    for (const char* word : object->always) {
      EXPECT_NE(text.find(word), std::string::npos) << isa.name << " has no " << word;
    }
  }
}
#endif

// ---- conversions ----

// flushes: denormal numbers become 0 in bf16.
template <class T>
void expect_stored_as_the_reference_does(const cpu::Kernels& kernels, const std::vector<T>& values, DType type,
                                         bool flushes = false) {
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<std::uint64_t> stored(values.size() + 1);
  std::vector<std::uint64_t> expected(values.size() + 1);
  const cpu::Matrix to{stored.data(), static_cast<std::int32_t>(type), 0, 1};
  kernels.store(values.data(), 0, to, 1, count);
  int wrong = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    store(expected.data(), type, n, static_cast<double>(values[n]));
    const double a = load(stored.data(), type, n);
    double b = load(expected.data(), type, n);
    if (flushes && type == DType::kBf16 && std::abs(values[n]) < T(0x1p-126)) {
      b = std::copysign(0.0, b);
    }
    if (!(a == b && std::signbit(a) == std::signbit(b)) && !(std::isnan(a) && std::isnan(b)) && ++wrong == 1) {
      ADD_FAILURE() << name_of(type) << " of " << values[n] << ": " << a << ", not " << b;
    }
  }
  EXPECT_EQ(wrong, 0) << name_of(type);
}

template <class T>
std::vector<T> values_to_round() {
  std::vector<T> values;
  const auto add_around = [&](double value) {
    const T v = static_cast<T>(value);
    values.push_back(v);
    values.push_back(std::nextafter(v, std::numeric_limits<T>::infinity()));
    values.push_back(std::nextafter(v, -std::numeric_limits<T>::infinity()));
  };
  for (int bits = 0; bits < 65536; ++bits) {
    for (const double value :
         {Half::to_double(static_cast<std::uint16_t>(bits)), Bfloat16::to_double(static_cast<std::uint16_t>(bits))}) {
      const double next = value * (1 + 0x1p-11);  // half way, for fp16; then for bf16
      add_around(value);
      add_around(next);
      add_around(value * (1 + 0x1p-8));
    }
  }
  for (int n = 0; n < 100; ++n) {
    add_around((n + 0.5) * 0x1p-24);  // between fp16's denormals
  }
  std::mt19937_64 random(7);
  for (int n = 0; n < 100000; ++n) {
    std::uint64_t bits = random();
    T value;
    std::memcpy(&value, &bits, sizeof value);
    values.push_back(value);
  }
  return values;
}

TEST(CpuTest, RoundingIsToNearestEven) {
  const std::vector<float> singles = values_to_round<float>();
  const std::vector<double> doubles = values_to_round<double>();
  for (const std::string& isa : available_isas()) {
    SCOPED_TRACE(isa);
    const ForcedIsa forced(isa);
    const cpu::Kernels& of_bf16 = cpu::kernels_for(DType::kBf16);  // an object of its own where bf16 is multiplied
    for (const DType type : {DType::kFp32, DType::kFp16, DType::kBf16}) {
      expect_stored_as_the_reference_does(cpu::kernels_for(DType::kFp32), singles, type);
      expect_stored_as_the_reference_does(cpu::kernels_for(DType::kFp64), doubles, type);
      expect_stored_as_the_reference_does(of_bf16, singles, type, flushes_denormals(isa));
    }
    expect_stored_as_the_reference_does(cpu::kernels_for(DType::kFp64), doubles, DType::kFp64);
  }
}

// One key: out = v, so every value of a 16-bit type must come through; to AMX denormals are 0.
TEST(CpuTest, EverySixteenBitValueIsRead) {
  for (const char* type : {"fp16", "bf16"}) {
    const check::Case c = case_of(std::string("bwd b=256 hq=1 sq=1 sk=1 d=4 dv=256 need=v ") + type);
    const check::Tensors tensors(c);
    const check::Tensor& v = *tensors.find("v");
    const check::Tensor& out = *tensors.find("out");
    for (std::int64_t n = 0; n < 65536; ++n) {
      reinterpret_cast<std::uint16_t*>(v.buffer->data())[v.existing[n]] = static_cast<std::uint16_t>(n);
    }
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      const bool unit = cpu::has_matrix_unit(c.problem.type);
      run(tensors, Direction::kForward);
      int wrong = 0;
      for (std::int64_t n = 0; n < 65536; ++n) {
        const double a = v.get(v.existing[n]);
        const double b = out.get(out.existing[n]);
        const bool flushed = unit && std::abs(a) < std::numeric_limits<float>::min() && b == 0;
        wrong += a == b || (std::isnan(a) && std::isnan(b)) || flushed ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0) << isa << ' ' << type;
    }
  }
}

// ---- exponentials ----

// q = 0, lse = 0 and do = 1: dv_j = exp(bias_j).
TEST(CpuTest, Exponential) {
  for (const char* type : {"fp32", "fp64"}) {
    const bool single = std::string(type) == "fp32";
    const check::Case c =
        case_of(std::string("bwd b=1 hq=1 sq=1 sk=20000 d=1 bias=1,1,q,k:") + type + " need=v " + type);
    const check::Tensors tensors(c);
    const auto set_all = [&](const char* name, double value) {
      for (const std::int64_t e : tensors.find(name)->existing) {
        tensors.find(name)->set(e, value);
      }
    };
    set_all("q", 0);
    set_all("lse", 0);
    set_all("grad_out", 1);
    set_all("out", 0);
    const check::Tensor& bias = *tensors.find("bias");
    const check::Tensor& grad_v = *tensors.find("grad_v");
    const double least = single ? -86.9 : -708;  // results below are flushed, or denormal
    const double largest = single ? 88.7 : 709.7;
    const double infinity = std::numeric_limits<double>::infinity();
    const std::array<double, 8> special{-infinity, -1e30, 0, -0.0, infinity, 1e30, single ? 89.0 : 710.0, NAN};
    std::mt19937_64 random(3);
    std::uniform_real_distribution<double> wide(least, largest);
    std::normal_distribution<double> narrow;
    for (std::size_t n = 0; n < bias.existing.size(); ++n) {
      bias.set(bias.existing[n], n < special.size() ? special[n] : n % 2 == 0 ? wide(random) : narrow(random));
    }
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      run(tensors, Direction::kBackward);
      double worst = 0;
      for (std::size_t n = 0; n < bias.existing.size(); ++n) {
        const double x = bias.get(bias.existing[n]);
        const double got = grad_v.get(grad_v.existing[n]);
        const double expected = std::exp(x);
        if (n < special.size()) {
          const double rounded = single ? static_cast<double>(static_cast<float>(expected)) : expected;
          EXPECT_TRUE(got == rounded || (std::isnan(got) && std::isnan(x))) << isa << ": exp(" << x << ") = " << got;
        } else {
          worst = std::max(worst, std::abs(got - expected) / expected);
        }
      }
      EXPECT_LT(worst, 2 * (single ? 0x1p-23 : 0x1p-52)) << isa << ' ' << type;
    }
  }
}

// Two keys with scores m and m - x, values 0 and 1: out = w / (1 + w) with w = exp(-x). Scores are exact in fp32. In
// base 2 the difference is multiplied by a rounded log2(e): that is an error of x quarters of a unit, or of x units
// where the product is rounded as well.
TEST(CpuTest, WeightsOfTheForward) {
  for (const char* type : {"fp32", "fp64"}) {
    for (const char* more : {"", " mask=1,1,q,k", " bias=1,1,q,k"}) {
      const bool single = std::string(type) == "fp32";
      const std::string line = std::string("fwd b=1 hq=1 sq=4000 sk=2 d=2 dv=1 scale=1 lse ") + type + more;
      const check::Case c = case_of(line);
      for (const double m : {0.0, 700.0, -700.0, 2000.0, -2000.0}) {
        const check::Tensors tensors(c);
        const auto set = [&](const char* name, const std::vector<double>& values) {
          const check::Tensor& tensor = *tensors.find(name);
          for (std::size_t n = 0; n < tensor.existing.size(); ++n) {
            tensor.set(tensor.existing[n], values[n % values.size()]);
          }
        };
        std::vector<double> q;
        for (int n = 0; n < 4000; ++n) {
          q.insert(q.end(), {1, n < 3900 ? n / 64.0 : n * 1000.0});  // from 95 (fp64: 708) on the weight is 0
        }
        set("q", q);
        set("k", {m, 0, m, -1});
        set("v", {0, 1});
        if (tensors.find("mask") != nullptr) {
          set("mask", {1});
        } else if (tensors.find("bias") != nullptr) {
          set("bias", {0});
        }
        for (const std::string& isa : available_isas()) {
          const ForcedIsa forced(isa);
          run(tensors, Direction::kForward);
          const check::Tensor& out = *tensors.find("out");
          const check::Tensor& lse = *tensors.find("lse");
          double worst = 0;
          double worst_lse = 0;
          for (std::size_t n = 0; n < out.existing.size(); ++n) {
            const double w = std::exp(-q[2 * n + 1]);
            const double got = out.get(out.existing[n]);
            if (n >= 3900) {
              EXPECT_EQ(got, 0) << isa << ' ' << line;
            } else {
              worst =
                  std::max(worst, std::abs(got * (1 + w) / w - 1) / (2 + q[2 * n + 1] * (without_fma(isa) ? 1 : 0.25)));
            }
            worst_lse =
                std::max(worst_lse, std::abs(lse.get(lse.existing[n]) - (m + std::log1p(w))) / (1 + std::abs(m)));
          }
          EXPECT_LT(worst, single ? 0x1p-23 : 0x1p-52) << isa << ' ' << line << " m=" << m;
          EXPECT_LT(worst_lse, 2 * (single ? 0x1p-23 : 0x1p-52)) << isa << ' ' << line << " m=" << m;
        }
      }
    }
  }
}

// A row of one key is that key's value, to the last bit, and nothing flows back to its query. In bf16 nothing at all:
// products of dO and V are summed in the same order and with the same roundings as those of dO and O.
TEST(CpuTest, RowsOfOneKey) {
  for (const char* type : {"fp32", "fp64", "bf16"}) {
    const check::Case c = case_of(std::string("bwd b=1 hq=3 hk=3 sq=200 sk=200 d=24 window=0,0 ") + type);
    const check::Tensors tensors(c);
    const check::Tensor& v = *tensors.find("v");
    const check::Tensor& out = *tensors.find("out");
    const check::Tensor& grad_q = *tensors.find("grad_q");
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      run(tensors, Direction::kForward);
      int others = 0;
      for (std::size_t n = 0; n < out.existing.size(); ++n) {
        others += out.get(out.existing[n]) == v.get(v.existing[n]) ? 0 : 1;
      }
      EXPECT_EQ(others, 0) << isa << ' ' << type;
      run(tensors, Direction::kBackward);
      int gradients = 0;
      for (const std::int64_t e : grad_q.existing) {
        const double limit = std::string(type) == "fp32" ? 1e-5 : std::string(type) == "fp64" ? 1e-14 : 0;
        gradients += std::abs(grad_q.get(e)) <= limit ? 0 : 1;
      }
      EXPECT_EQ(gradients, 0) << isa << ' ' << type;
    }
  }
}

// ---- sums ----

// Terms that are all equal are rounded the same way each time: in one chain of fp32 the error of 16,384 of them was up
// to 1.5e-4 of the sum. Other sums of as many terms may be as wrong, and the naive formula of check/naive.h is, too.
TEST(CpuTest, SumsOfManyTerms) {
  constexpr double kMost = 5e-6;  // of the sum; PyTorch 2.15 has 2e-6
  const auto fill = [](const check::Tensors& tensors, const char* name, double value) {
    const check::Tensor& tensor = *tensors.find(name);
    for (const std::int64_t e : tensor.existing) {
      tensor.set(e, value);
    }
  };
  const auto worst = [](const check::Tensor& tensor, double expected) {
    double error = 0;
    for (const std::int64_t e : tensor.existing) {
      error = std::max(error, std::abs(std::abs(tensor.get(e)) / expected - 1));
    }
    return error;
  };
  const auto tenth = static_cast<double>(0.1F);
  for (const std::string& isa : available_isas()) {
    const ForcedIsa forced(isa);
    // Equal weights: out is v. With few rows, and with some that a mask or a window leaves keys of.
    for (const char* line : {"fwd b=1 hq=1 sq=1 sk=16384 d=16", "fwd b=1 hq=1 sq=40 sk=16384 d=16",
                             "fwd b=1 hq=1 sq=40 sk=16384 d=16 causal window=15000,0"}) {
      const check::Case c = case_of(line);
      const check::Tensors tensors(c);
      fill(tensors, "q", 0);
      fill(tensors, "v", tenth);
      run(tensors, Direction::kForward);
      EXPECT_LE(worst(*tensors.find("out"), tenth), kMost) << isa << ' ' << line;
    }
    // Two keys with values 1 and -1: P is 1/2 for both, dP is 16 times 0.1 or -0.1, delta 0.
    const check::Case c = case_of("bwd b=1 hq=1 sq=16384 sk=2 d=16 bias=1,1,1,k");
    const check::Tensors tensors(c);
    fill(tensors, "q", 0);
    fill(tensors, "bias", 0);
    const check::Tensor& v = *tensors.find("v");
    for (std::size_t n = 0; n < v.existing.size(); ++n) {
      v.set(v.existing[n], n < v.existing.size() / 2 ? 1 : -1);
    }
    fill(tensors, "grad_out", tenth);
    run(tensors, Direction::kForward);
    run(tensors, Direction::kBackward);
    EXPECT_LE(worst(*tensors.find("grad_v"), 16384 * tenth / 2), kMost) << isa;
    EXPECT_LE(worst(*tensors.find("grad_bias"), 16384 * 16 * tenth / 2), kMost) << isa;
  }
}

// A hidden key's weight is 0, and 0 times an infinite value is NaN: which rows have it depends on the rows that are
// computed together, and these do not depend on the number of threads.
TEST(CpuTest, InfiniteValuesAndThreads) {
  for (const char* line : {"bwd b=4 hq=1 sq=200 sk=200 d=16 causal", "bwd b=4 hq=1 sq=200 sk=200 d=16 bf16 causal",
                           "bwd b=2 hq=1 sq=331 sk=331 d=16 window=20,5",
                           "bwd b=1 hq=1 sq=1100 sk=1105 d=16 bf16 causal"}) {  // strips end beside multiples of 32
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      std::vector<double> first;
      for (const int threads : {1, 2, 3, 7}) {
        const check::Case c = case_of(line);
        const check::Tensors tensors(c);
        const check::Tensor& v = *tensors.find("v");
        for (std::size_t n = 0; n < v.existing.size(); n += 397) {
          v.set(v.existing[n], std::numeric_limits<double>::infinity());
        }
        fovea_set_num_threads(threads);
        run(tensors, Direction::kForward);
        run(tensors, Direction::kBackward);
        fovea_set_num_threads(0);
        std::vector<double> all;
        for (const char* name : {"out", "grad_q", "grad_k", "grad_v"}) {
          const check::Tensor& tensor = *tensors.find(name);
          for (const std::int64_t e : tensor.existing) {
            const double value = tensor.get(e);
            all.push_back(std::isnan(value) ? 12345 : value);
          }
        }
        EXPECT_TRUE(std::count(all.begin(), all.end(), 12345) > 0 && all[0] != 12345) << line;
        if (threads == 1) {
          first = all;
        }
        EXPECT_TRUE(all == first) << isa << ' ' << line << ' ' << threads;
      }
    }
  }
}

// ---- distances ----

// lse of one query and the first keys, all of them zeros, by a task of its own: without the memory that a caller would
// need for so many keys.
double lse_of_zeros(const std::string& isa, DType type, cpu::SequenceArgs sequence, std::int64_t keys, double slope) {
  const cpu::Kernels& kernels = cpu::kernels_for(type);
  std::array<double, 16> zeros{};  // q, k and v
  double out = 1;
  double lse = 1;
  const auto of = [&](void* data) { return cpu::Matrix{data, static_cast<std::int32_t>(type), 1, 1}; };
  const char* ran = "";
  cpu::Options options{};
  options.head_dim = 1;
  options.head_dim_v = 1;
  options.scale = 1;
  options.keep_factor = 1;
  options.block_rows = 16;
  options.block_keys = 16;
  options.ran = &ran;
  cpu::ForwardHead head{};
  head.head.q = of(zeros.data());
  head.head.alibi = slope != 0;
  head.head.slope = slope;
  head.out = of(&out);
  head.lse = of(&lse);
  head.sink = -std::numeric_limits<double>::infinity();
  cpu::ForwardTask task{};
  task.options = &options;
  task.sequence = sequence;
  task.k = of(zeros.data());
  task.v = of(zeros.data());
  task.heads = &head;
  task.row_end = 1;
  task.key_end = keys;
  task.first_keys = true;
  std::vector<char> scratch(kernels.forward_scratch(options) + cpu::Arena::kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
  kernels.forward(task, scratch.data() + (-address) % cpu::Arena::kAlignment);
  EXPECT_EQ(ran, isa);
  return load(&lse, type, 0);
}

// ALiBi's |i + shift - j| where it is beyond 32 bits; and a key that the band leaves out before 2^31 and more that it
// has.
TEST(CpuTest, DistancesBeyond32Bits) {
  constexpr double kSlope = 0x1p-30;
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  for (const DType type : {DType::kFp32, DType::kFp64}) {
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      if (isa != cpu::kernels_for(type).name) {
        continue;  // a matrix unit, which leaves this type to another instruction set
      }
      for (const std::int64_t shift : {std::int64_t{3} << 30, -(std::int64_t{3} << 30), std::int64_t{1} << 30}) {
        const double expected = std::log(std::exp(-kSlope * static_cast<double>(std::abs(shift))) +
                                         std::exp(-kSlope * static_cast<double>(std::abs(1 - shift))));
        EXPECT_NEAR(lse_of_zeros(isa, type, {1, 2, -kFar, kFar, shift}, 2, kSlope), expected, 1e-6)
            << isa << ' ' << name_of(type) << ' ' << shift;
      }
      for (const std::int64_t keys : {std::int64_t{5} << 29, std::int64_t{1} << 32, std::int64_t{3} << 40}) {
        EXPECT_NEAR(lse_of_zeros(isa, type, {1, keys, 1, kFar * 8, 0}, 16, 0), std::log(15), 1e-6)
            << isa << ' ' << name_of(type) << ' ' << keys;
      }
    }
  }
}

// ---- keys in parts ----

// Few queries against many keys: the keys are split over tasks, each leaves an unfinished state, and these are merged.
// Sequences so short that parts have no keys, with lengths that are not multiples of 16.
TEST(CpuTest, KeysInParts) {
  for (const auto& [line, values] :
       {std::pair("bwd b=1 hq=2 hk=1 sq=3 sk=3000 d=64 bf16 sink dlse", check::Values::kNormal),
        std::pair("bwd b=1 hq=1 sq=40 sk=2500 d=24 fp32 sink causal window=2000,0", check::Values::kLargeScores),
        std::pair("bwd b=2 hq=2 sq=2 sk=2100 d=5 fp64 sink mask=b,1,1,k alibi=h", check::Values::kOneHot),
        std::pair("bwd b=1 hq=2 sq=7 sk=2100 d=16 fp64 sink bias=1,h,q,k", check::Values::kMinusInfinity),
        std::pair("bwd b=3 hq=1 sq=9 sk=2200 d=80 bf16 used_k=1,20,2100", check::Values::kNormal),
        std::pair("bwd b=3 hq=4 hk=1 sq=1 sk=2200 d=80 fp32 used_k=1,20,2100", check::Values::kNormal)}) {
    check::Case c = case_of(line);
    c.values = values;
    const check::Trial trial(c);
    Problem forward = c.problem;
    forward.direction = Direction::kForward;
    const Shapes shapes(forward);
    EXPECT_GT(cpu::forward_parallelism(validate(shapes.get(), Direction::kForward, /*shapes_only=*/true), 2),
              forward.batch() * forward.heads_k)
        << line << ": keys are not split";
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      const check::Outcome outcome = trial.test("cpu");
      EXPECT_TRUE(outcome.passed()) << isa << ' ' << line << '\n' << check::to_text(outcome);
    }
  }
}

// The merge by itself: states of parts whose maxima rise and fall, of one without keys and of one whose keys are all
// hidden. The sink goes into the first part alone.
TEST(CpuTest, PartsAreMerged) {
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kKeys = 76;
  constexpr std::array<std::int64_t, 6> kEnds = {0, 16, 16, 48, 64, kKeys};  // of parts 16 to 48 are hidden
  constexpr std::array<double, kRows> kSinks = {-1, 2, -std::numeric_limits<double>::infinity()};
  std::mt19937_64 engine(5);
  std::normal_distribution<double> normal;
  std::array<double, kRows * kKeys> scores{};
  std::array<double, kKeys> values{};
  for (std::int64_t n = 0; n < kRows * kKeys; ++n) {
    const std::int64_t key = n % kKeys;
    scores[n] = key >= 16 && key < 48 ? -std::numeric_limits<double>::infinity()
                                      : normal(engine) + (key < 16   ? 3
                                                          : key < 64 ? 30
                                                                     : 25);
    values[key] = normal(engine);
  }
  for (const std::string& isa : available_isas()) {
    const ForcedIsa forced(isa);
    const cpu::Kernels& kernels = cpu::kernels_for(DType::kFp64);
    const auto of = [](double* data, std::int64_t row) { return cpu::Matrix{data, FOVEA_FP64, row, 1}; };
    for (std::int64_t row = 0; row < kRows; ++row) {
      double zero = 0;  // q and k: scores are the bias
      double out = 0;
      double lse = 0;
      const char* ran = "";
      cpu::Options options{};
      options.head_dim = options.head_dim_v = 1;
      options.scale = options.keep_factor = 1;
      options.block_rows = options.block_keys = 16;
      options.ran = &ran;
      cpu::ForwardHead head{};
      head.head.q = of(&zero, 0);
      head.head.bias[0] = of(scores.data() + row * kKeys, 0);
      head.out = of(&out, 0);
      head.lse = of(&lse, 0);
      head.sink = kSinks[row];
      cpu::ForwardTask task{};
      task.options = &options;
      task.sequence = {1, kKeys, -kKeys, kKeys, 0};
      task.k = of(&zero, 0);
      task.v = of(values.data(), 1);
      task.heads = &head;
      task.row_end = 1;
      constexpr auto kAlignment = static_cast<std::size_t>(cpu::Arena::kAlignment);
      const std::size_t partial = (kernels.forward_partial(options) + kAlignment - 1) / kAlignment * kAlignment;
      constexpr std::size_t kParts = kEnds.size() - 1;
      std::vector<char> memory(kernels.forward_scratch(options) + kParts * partial + kAlignment);
      char* const partials = memory.data() + (-reinterpret_cast<std::uintptr_t>(memory.data())) % kAlignment;
      char* const scratch = partials + kParts * partial;
      for (std::size_t part = 0; part < kParts; ++part) {
        task.key_begin = kEnds[part];
        task.key_end = kEnds[part + 1];
        task.first_keys = part == 0;
        task.partial = partials + part * partial;
        kernels.forward(task, scratch);
      }
      kernels.forward_merge({&options, task.sequence, &head, 0, 1, partials, partial, kParts}, scratch);
      double sum = std::exp(kSinks[row]);
      double expected = 0;
      for (std::int64_t key = 0; key < kKeys; ++key) {
        const double weight = std::exp(scores[row * kKeys + key]);
        sum += weight;
        expected += weight * values[key];
      }
      EXPECT_NEAR(lse, std::log(sum), 1e-13 * std::log(sum)) << isa << ' ' << row;
      EXPECT_NEAR(out, expected / sum, 1e-12) << isa << ' ' << row;
    }
  }
}

// ---- sums of dq ----

// In 16 bits dq is summed aside, for as many heads at once as go into 64 MiB. Each entry of the batch is computed by
// itself, too, where all goes into one chunk. The workspace lies between two pages that nobody may touch.
TEST(CpuTest, SumsOfDqInChunks) {
  constexpr std::int64_t kEntries = 3;
  constexpr std::int64_t kQueries = 28000;  // with kColumns 27 MiB of sums an entry
  constexpr std::int64_t kKeys = 65;        // a block and a key
  constexpr std::int64_t kColumns = 256;
  const auto numbers = [](std::int64_t rows, std::uint32_t state) {
    std::vector<std::uint16_t> all(static_cast<std::size_t>(kEntries * rows * kColumns));
    for (std::uint16_t& number : all) {
      state = state * 1664525 + 1013904223;
      number = static_cast<std::uint16_t>(0x3E00 | (state >> 16 & 0x80FF));  // 1/8 to 1/2, of either sign
    }
    return all;
  };
  std::vector<std::uint16_t> q = numbers(kQueries, 1);
  std::vector<std::uint16_t> k = numbers(kKeys, 2);
  std::vector<std::uint16_t> v = numbers(kKeys, 3);
  std::vector<std::uint16_t> out = numbers(kQueries, 4);
  std::vector<std::uint16_t> grad_out = numbers(kQueries, 5);
  std::vector<float> lse(static_cast<std::size_t>(kEntries * kQueries), 4.0F);
  const auto dq_of = [&](std::int64_t first, std::int64_t entries) {
    const auto tensor = [&](auto& memory, std::int64_t rows) {
      return fovea_tensor{sizeof(fovea_tensor),
                          memory.data() + first * rows * kColumns,
                          FOVEA_BF16,
                          4,
                          0,
                          0,
                          {entries, rows, 1, kColumns},
                          {}};
    };
    std::vector<std::uint16_t> dq(static_cast<std::size_t>(kEntries * kQueries * kColumns));
    const fovea_tensor all_q = tensor(q, kQueries);
    const fovea_tensor all_k = tensor(k, kKeys);
    const fovea_tensor all_v = tensor(v, kKeys);
    const fovea_tensor all_out = tensor(out, kQueries);
    const fovea_tensor all_grad_out = tensor(grad_out, kQueries);
    const fovea_tensor all_dq = tensor(dq, kQueries);
    const fovea_tensor all_lse{
        sizeof(fovea_tensor), lse.data() + first * kQueries, FOVEA_FP32, 3, 0, 0, {entries, 1, kQueries}, {}};
    fovea_problem problem{};
    problem.size = sizeof(problem);
    problem.q = &all_q;
    problem.k = &all_k;
    problem.v = &all_v;
    problem.out = &all_out;
    problem.lse = &all_lse;
    problem.grad_out = &all_grad_out;
    problem.grad_q = &all_dq;
    std::size_t bytes = 0;
    EXPECT_EQ(fovea_workspace(&problem, FOVEA_BACKWARD, &bytes), FOVEA_OK) << fovea_last_error();
    const check::Guarded memory(bytes);
    EXPECT_EQ(fovea_backward(&problem, memory.end() - bytes, bytes), FOVEA_OK) << fovea_last_error();
    return dq;
  };
  const std::vector<std::uint16_t> together = dq_of(0, kEntries);
  std::vector<std::uint16_t> alone(together.size());
  for (std::int64_t entry = 0; entry < kEntries; ++entry) {
    const std::vector<std::uint16_t> one = dq_of(entry, 1);
    const auto at = static_cast<std::ptrdiff_t>(entry * kQueries * kColumns);
    std::copy_n(one.begin() + at, kQueries * kColumns, alone.begin() + at);
  }
  EXPECT_TRUE(std::any_of(together.begin(), together.end(), [](std::uint16_t bits) { return (bits & 0x7FFF) != 0; }));
  EXPECT_TRUE(together == alone);
}

// ---- threads ----

// The sanitizer cannot follow threads that are made after a fork.
#if defined(__SANITIZE_THREAD__)
constexpr bool kCanFork = false;
#else
constexpr bool kCanFork = true;
#endif

std::int64_t threads_of_this_process() {
  std::int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

// Runs `body` in a child and says whether it returned true.
template <class Body>
bool in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(CpuTest, ThreadsAreMadeWhenThereIsWorkAndAgainAfterFork) {
  if (!kCanFork) {
    GTEST_SKIP() << "ThreadSanitizer does not follow threads made after a fork";
  }
  const check::Case c = case_of("bwd b=2 hq=4 sq=200 sk=200 d=16 bias=1,1,q,k");
  const check::Trial trial(c);
  cpu::set_num_threads(3);
  const std::vector<std::uint8_t> expected = trial.bytes("cpu");  // this process has its pool now
  EXPECT_GE(threads_of_this_process(), 3);
  EXPECT_TRUE(in_child([&] {
    bool good = threads_of_this_process() == 1;  // fork() takes along the calling thread alone
    cpu::set_num_threads(1);
    good = good && trial.bytes("cpu") == expected && threads_of_this_process() == 1;
    cpu::set_num_threads(3);
    return good && trial.bytes("cpu") == expected && threads_of_this_process() == 3;
  }));
  EXPECT_TRUE(trial.bytes("cpu") == expected);
  cpu::set_num_threads(0);
}

TEST(CpuTest, CallsFromSeveralThreads) {
  const check::Case c = case_of("bwd b=2 hq=4 hk=2 sq=150 sk=130 d=24 causal bias=b,h,q,k dropout=0.3");
  const check::Trial alone(c);
  const std::vector<std::uint8_t> expected = alone.bytes("cpu");
  cpu::set_num_threads(3);
  std::array<int, 4> wrong{};
  std::vector<std::thread> callers;
  callers.reserve(wrong.size());
  for (int& count : wrong) {
    callers.emplace_back([&] {
      const check::Trial trial(c);
      for (int round = 0; round < 5; ++round) {
        count += trial.bytes("cpu") == expected ? 0 : 1;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  cpu::set_num_threads(0);
  EXPECT_EQ(wrong, (std::array<int, 4>{}));
}

TEST(CpuTest, NumberOfThreads) {
  cpu::set_num_threads(5);
  EXPECT_EQ(cpu::num_threads(), 5);
  cpu::set_num_threads(0);
  EXPECT_EQ(cpu::num_threads(), cpu::available_threads());
  EXPECT_GE(cpu::available_threads(), 1);
  if (!kCanFork) {
    GTEST_SKIP() << "the rest needs a fork";
  }
  EXPECT_TRUE(in_child([] {
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &all)) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        return sched_setaffinity(0, sizeof one, &one) == 0 && cpu::available_threads() == 1;
      }
    }
    return false;
  }));
}

}  // namespace
}  // namespace fovea
