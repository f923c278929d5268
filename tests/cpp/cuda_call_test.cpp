// SPDX-License-Identifier: Apache-2.0
//
// Calls of the CUDA backend through the C ABI with a driver and a compiler that are played (fake/): which kernels are
// launched with what, what is loaded when, captures, devices, threads, errors. Addresses are made up, so whoever
// dereferences one crashes. The test starts itself anew with the played libraries in the loader's path.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "check/cases.h"
#include "core/fields.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/config/print.h"
#include "cuda/device/args.h"
#include "cuda/executable.h"

namespace fovea {
namespace {

TEST(CudaCall, WithAPlayedDriver) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto run = [&](const char* set, const char* filter) {
    const std::string command = fmt::format(
        "env -u FOVEA_BACKEND -u FOVEA_KERNEL LD_LIBRARY_PATH={0} FOVEA_NVRTC={0}/libnvrtc.so.13 FOVEA_CACHE_DIR=none "
        "FOVEA_JIT=jit {1} '{2}' --gtest_also_run_disabled_tests --gtest_brief=1 --gtest_filter='{3}'",
        FOVEA_FAKE_CUDA, set, self, filter);
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  };
  run("FOVEA_CHECK=0", "DISABLED_PlayedCuda.*-*WhereThatIsAskedFor:*.AnOldGpu*:*.WithAn*:*.WithNothing*");
  run("FOVEA_CHECK=yes", "DISABLED_PlayedCuda.WithAnUnknownValue*");
  run("FOVEA_JIT=off", "DISABLED_PlayedCuda.WithNothingToCompile*");
  run("FOVEA_CHECK=1", "DISABLED_PlayedCuda.*WhereThatIsAskedFor");
  run("FAKE_CAPABILITY=7", "DISABLED_PlayedCuda.AnOldGpu*");
}

// As fake/cuda.c has it.
struct Launched {
  const char* name;
  unsigned grid_x, block_x, shared_bytes;
  void* stream;
};

struct Map {
  void* address;
  int type, swizzle;
  unsigned rank, box[5];
  std::uint64_t dims[5], strides[4];
};

class Given;

class DISABLED_PlayedCuda : public ::testing::Test {
 protected:
  static void* library() {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    return library;
  }
  template <class T>
  static T& variable(const char* name) {
    return *static_cast<T*>(dlsym(library(), name));
  }
  static int& loads() { return variable<int>("fake_loads"); }
  static int& launches() { return variable<int>("fake_launches"); }
  static Launched* launched() { return &variable<Launched>("fake_launched"); }
  static cuda::Args args_of(const Given& given, const char* kernel);
};

// A problem whose tensors lie nowhere.
class Given {
 public:
  explicit Given(const Problem& problem, int device = 0) : problem_(problem) {
    problem_.device = FOVEA_CUDA;
    shapes_.emplace(problem_);
    raw = shapes_->get();
    raw.device_index = device;
    std::uintptr_t address = std::uintptr_t{1} << 44;
    tensors_.reserve(32);
    for (const fovea_tensor** tensor : {&raw.q,
                                        &raw.k,
                                        &raw.v,
                                        &raw.bias,
                                        &raw.bias2,
                                        &raw.mask,
                                        &raw.alibi_slopes,
                                        &raw.sink,
                                        &raw.cu_seqlens_q,
                                        &raw.cu_seqlens_k,
                                        &raw.seqused_q,
                                        &raw.seqused_k,
                                        &raw.positions_q,
                                        &raw.positions_k,
                                        &raw.dropout_streams,
                                        &raw.out,
                                        &raw.lse,
                                        &raw.grad_out,
                                        &raw.grad_lse,
                                        &raw.grad_q,
                                        &raw.grad_k,
                                        &raw.grad_v,
                                        &raw.grad_bias,
                                        &raw.grad_bias2,
                                        &raw.grad_sink}) {
      if (*tensor != nullptr) {
        tensors_.push_back(**tensor);
        tensors_.back().data = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
        address += std::uintptr_t{1} << 36;
        *tensor = &tensors_.back();
      }
    }
    raw.seed_ptr = reinterpret_cast<const std::uint64_t*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  explicit Given(const std::string& line, int device = 0) : Given(parse(line), device) {}

  fovea_direction direction() const { return static_cast<fovea_direction>(problem_.direction); }
  fovea_status prepare() const { return fovea_prepare(&raw, direction()); }
  fovea_status call() const {
    std::size_t bytes = 0;
    if (const fovea_status status = fovea_workspace(&raw, direction(), &bytes); status != FOVEA_OK) {
      return status;
    }
    void* workspace = reinterpret_cast<void*>((std::uintptr_t{1} << 43) + 1);  // NOLINT(performance-no-int-to-ptr)
    return problem_.direction == Direction::kForward ? fovea_forward(&raw, workspace, bytes)
                                                     : fovea_backward(&raw, workspace, bytes);
  }
  cuda::Plan plan() const {
    return cuda::plan_for(validate(raw, problem_.direction, /*shapes_only=*/false), cuda::target_of("sm_90"));
  }

  fovea_problem raw;

 private:
  Problem problem_;
  std::optional<Shapes> shapes_;
  std::vector<fovea_tensor> tensors_;
};

TEST_F(DISABLED_PlayedCuda, EveryRowOfTheTableIsLaunchedAsPlanned) {
  int called = 0;
  for (const check::Case& c : check::cases(check::table_of_environment())) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Problem problem = direction == Direction::kForward ? check::forward_of(c.problem) : c.problem;
      if (problem.type == DType::kFp64) {
        continue;
      }
      const Given given(problem);
      launches() = 0;
      ASSERT_EQ(given.call(), FOVEA_OK) << print(problem) << ": " << fovea_last_error();
      cuda::Plan plan = given.plan();
      if (plan.clears_rows && !problem.clear_rows) {
        plan.launches.erase(plan.launches.begin());
      }
      ASSERT_EQ(static_cast<std::size_t>(launches()), plan.launches.size()) << print(problem);
      for (int i = 0; i < launches(); ++i) {
        const cuda::Launch& expected = plan.launches[static_cast<std::size_t>(i)];
        EXPECT_EQ(launched()[i].name, cuda::request_of(expected.kernel, plan.target).expression());
        EXPECT_EQ(launched()[i].grid_x, expected.blocks);
        EXPECT_EQ(launched()[i].block_x, static_cast<unsigned>(expected.kernel.threads));
        EXPECT_EQ(launched()[i].shared_bytes, static_cast<unsigned>(expected.kernel.shared_bytes));
      }
      ++called;
    }
  }
  EXPECT_GT(called, 50);
}

// Whether what was launched since `launches() = 0` is this plan.
std::string launched_as(const cuda::Plan& plan, const Launched* launched, int count) {
  std::string text;
  for (const cuda::Launch& launch : plan.launches) {
    if (std::string_view(launch.kernel.name) != "clear_rows") {
      text += fmt::format("{} {}\n", cuda::request_of(launch.kernel, plan.target).expression(), launch.blocks);
    }
  }
  std::string found;
  for (int i = 0; i < count; ++i) {
    found += fmt::format("{} {}\n", launched[i].name, launched[i].grid_x);
  }
  return text == found ? "" : fmt::format("planned\n{}launched\n{}", text, found);
}

TEST_F(DISABLED_PlayedCuda, CallsThatDifferInOneFieldLaunchWhatEachNeeds) {
  // For every field that plans depend on two problems that differ in it alone (and in what follows from it), whose
  // plans differ. A plan that is kept under a key without the field would be taken for the second problem.
  const std::string dense = "b=2x2 hq=4 hk=2 sq=96 sk=160 d=64 bf16";
  const std::string packed = "b=2 hq=4 hk=2 seqs_q=13,40 seqs_k=15,60 max_q=40 max_k=60 d=64 bf16";
  const std::string biases = "bias=b,h,q,k bias2=1,1,q,k";
  const auto changed = [](std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << " in " << text;
    return text.replace(at, from.size(), to);
  };
  const std::map<std::string, std::pair<std::string, std::string>> pairs = {
      {"direction", {"fwd " + dense, "bwd " + dense}},
      {"batch1", {"fwd " + dense, "fwd " + changed(dense, "b=2x2", "b=30x2")}},
      {"batch2", {"fwd " + dense, "fwd " + changed(dense, "b=2x2", "b=2x30")}},
      {"heads_q", {"fwd " + dense, "fwd " + changed(dense, "hq=4", "hq=40")}},
      {"heads_k", {"bwd " + dense, "bwd " + changed(dense, "hk=2", "hk=4")}},
      {"seqlen_q", {"fwd " + dense, "fwd " + changed(dense, "sq=96", "sq=9600")}},
      {"seqlen_k", {"bwd " + dense, "bwd " + changed(dense, "sk=160", "sk=1600")}},
      {"head_dim", {"fwd " + dense + " dv=64", "fwd " + changed(dense, "d=64", "d=128") + " dv=64"}},
      {"head_dim_v", {"fwd " + dense + " dv=64", "fwd " + dense + " dv=128"}},
      {"type", {"fwd " + dense, "fwd " + changed(dense, "bf16", "fp16")}},
      {"packed", {"fwd b=2 hq=4 hk=2 sq=40 sk=60 d=64 bf16", "fwd " + packed}},
      {"total_q", {"bwd " + packed + " total_q=53 total_k=75", "bwd " + packed + " total_q=20000 total_k=75"}},
      {"total_k",
       {"bwd " + changed(packed, "bf16", "fp32") + " total_q=53 total_k=75",
        "bwd " + changed(packed, "bf16", "fp32") + " total_q=53 total_k=20000"}},
      {"has_used_q", {"fwd " + dense, "fwd " + dense + " used_q=96,90,80,70"}},
      {"has_used_k", {"fwd " + dense, "fwd " + dense + " used_k=160,90,80,70"}},
      {"causal", {"fwd " + dense, "fwd " + dense + " causal"}},
      {"top_left",
       {"fwd b=2 hq=4 sq=1 sk=160 d=64 bf16 causal alibi=h",
        "fwd b=2 hq=4 sq=1 sk=160 d=64 bf16 causal alibi=h align=tl"}},
      {"window_left", {"fwd " + dense + " window=-1,7", "fwd " + dense + " window=5,7"}},
      {"window_right", {"fwd " + dense + " window=-1,-1", "fwd " + dense + " window=-1,7"}},
      {"positions", {"fwd " + dense + " causal", "fwd " + dense + " causal pos=64,0"}},
      {"dropout_streams", {"bwd " + dense + " dropout=0.1", "bwd " + dense + " dropout=0.1 streams=b,h"}},
      {"bias", {"fwd " + dense, "fwd " + dense + " bias=1,h,q,k"}},
      {"bias2", {"fwd " + dense + " bias=1,h,q,k", "fwd " + dense + " bias=1,h,q,k bias2=b,1,1,k"}},
      {"mask", {"fwd " + dense, "fwd " + dense + " mask=b,1,q,k"}},
      {"alibi", {"fwd " + dense, "fwd " + dense + " alibi=h"}},
      {"sink", {"bwd " + dense, "bwd " + dense + " sink"}},
      {"rng", {"fwd " + dense + " dropout=0.1", "fwd " + dense + " dropout=0.1 rng=torch_mem_efficient"}},
      {"deterministic",
       {"bwd " + changed(dense, "sk=160", "sk=1600"), "bwd " + changed(dense, "sk=160", "sk=1600") + " det"}},
      {"need",
       {"bwd " + dense + " " + biases + " need=q,k,v,bias", "bwd " + dense + " " + biases + " need=q,k,v,bias2"}},
      {"wide", {"bwd " + dense, "bwd " + dense + " wide=k"}},
      {"accumulate",
       {"bwd " + changed(dense, "bf16", "fp32") + " need=q,k",
        "bwd " + changed(dense, "bf16", "fp32") + " need=q,k add=q"}},
      // Numbers, of which a plan knows a range.
      {"scale", {"fwd " + dense + " scale=0.1", "fwd " + dense + " scale=-0.1"}},
      {"softcap", {"fwd " + dense, "fwd " + dense + " softcap=3"}},
      {"dropout", {"fwd " + dense + " dropout=0.1", "fwd " + dense + " dropout=0.9"}},
  };
  // Fields that a plan may depend on and none does today, and numbers that only kernels read.
  const std::set<std::string> alike = {"lse",        "grad_lse",        "seed",           "offset", "position_q",
                                       "position_k", "has_positions_q", "has_positions_k"};
  const Problem usual;
  for_each_field(usual, [&](const char* name, const auto&, Role role) {
    const bool matters = role == Role::kPlan || role == Role::kNumber;
    EXPECT_EQ(matters, pairs.count(name) + alike.count(name) == 1)
        << name << ": two problems that differ in it, please";
  });
  for (const auto& [field, both] : pairs) {
    std::vector<std::string> plans;
    for (const std::string& line : {both.first, both.second}) {
      const Given given(line);
      launches() = 0;
      ASSERT_EQ(given.call(), FOVEA_OK) << line << ": " << fovea_last_error();
      const cuda::Plan plan = given.plan();
      std::size_t bytes = 0;
      ASSERT_EQ(fovea_workspace(&given.raw, given.direction(), &bytes), FOVEA_OK);
      const auto planned = static_cast<std::size_t>(plan.workspace.bytes());
      EXPECT_EQ(bytes, planned > 0 ? planned + cuda::Workspace::kAlignment - 1 : 0) << field << ": " << line;
      EXPECT_EQ(launched_as(plan, launched(), launches()), "") << field << ": " << line << " after " << both.first;
      plans.push_back(fmt::format("{} {}", plan.summary, plan.workspace.bytes()));
      for (const cuda::Launch& launch : plan.launches) {
        plans.back() += fmt::format(" {} {} {}", launch.kernel.name, print(launch.kernel.spec), launch.blocks);
      }
    }
    EXPECT_NE(plans[0], plans[1]) << field << ": the two are planned alike and prove nothing";
  }
}

TEST_F(DISABLED_PlayedCuda, CallsThatDifferInOneAddressLaunchWhatEachNeeds) {
  const std::string line = "bwd b=2 hq=4 sq=96 sk=160 d=64 bf16 bias=b,h,q,k bias2=1,1,q,k need=q,k,v,bias,bias2";
  int moved = 0;
  for (const fovea_tensor* fovea_problem::*tensor :
       {&fovea_problem::q, &fovea_problem::k, &fovea_problem::v, &fovea_problem::bias, &fovea_problem::bias2,
        &fovea_problem::grad_out, &fovea_problem::grad_q, &fovea_problem::grad_k, &fovea_problem::grad_v,
        &fovea_problem::grad_bias}) {
    Given given(line);
    ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
    auto* const its = const_cast<fovea_tensor*>(given.raw.*tensor);
    its->data = static_cast<char*>(its->data) + 2;
    launches() = 0;
    ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
    EXPECT_EQ(launched_as(given.plan(), launched(), launches()), "") << moved;
    ++moved;
  }
}

// ---- what a launch is handed ----

// The Args of the latest launch of a kernel whose name has `kernel` in it.
cuda::Args DISABLED_PlayedCuda::args_of(const Given& given, const char* kernel) {
  static_assert(sizeof(cuda::Args) <= 4096);
  variable<const char*>("fake_kept_kernel") = kernel;
  variable<std::size_t>("fake_kept_bytes") = sizeof(cuda::Args);
  auto& kept = variable<std::array<unsigned char, sizeof(cuda::Args)>>("fake_kept");
  kept.fill(0xEE);
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  cuda::Args args;
  std::memcpy(static_cast<void*>(&args), kept.data(), sizeof(args));
  variable<const char*>("fake_kept_kernel") = nullptr;
  return args;
}

// Strides by logical coordinates of a tensor of rows (batch, row, head, column), as the caller gave them.
void expect_rows(const cuda::Tensor& got, const fovea_tensor* given, const char* name) {
  ASSERT_NE(given, nullptr) << name;
  EXPECT_EQ(got.data, given->data) << name;
  std::array<std::int64_t, 5> strides{};
  std::int64_t next = 1;
  for (int d = given->rank - 1; d >= 0; --d) {
    strides[d] = (given->flags & FOVEA_TENSOR_STRIDED) != 0 ? given->stride[d] : next;
    next *= given->shape[d];
  }
  EXPECT_EQ(got.strides.batch1, strides[0]) << name;
  EXPECT_EQ(got.strides.row, strides[1]) << name;
  EXPECT_EQ(got.strides.head, strides[2]) << name;
  EXPECT_EQ(got.strides.col, strides[3]) << name;
}

// Every number of the problem, where the kernel looks for it. All differ.
TEST_F(DISABLED_PlayedCuda, ArgumentsAreWhatWasGiven) {
  const std::string common =
      " b=3 hq=6 hk=2 sq=320 sk=448 d=64 dv=128 layout=bhsd causal align=tl window=200,-1 scale=0.3 softcap=7 sink "
      "alibi=h bias=b,h,q,k mask=b,h,q,k dropout=0.25 seed=41 offset=43 ";
  for (const std::string type : {"bf16", "fp16"}) {
    const Given given("fwd" + common + type + " lse");
    const cuda::Args a = args_of(given, "_forward<");
    const fovea_problem& raw = given.raw;
    EXPECT_EQ(a.rows.batch1, 3);
    EXPECT_EQ(a.rows.batch2, 1);
    EXPECT_EQ(a.rows.heads_q, 6);
    EXPECT_EQ(a.rows.heads_k, 2);
    EXPECT_EQ(a.rows.rows_q, 320);
    EXPECT_EQ(a.rows.rows_k, 448);
    EXPECT_EQ(a.head_dim, 64);
    EXPECT_EQ(a.head_dim_v, 128);
    EXPECT_EQ(a.scale, 0.3F);
    EXPECT_EQ(a.softcap, 7.0F);
    EXPECT_TRUE(a.causal);
    EXPECT_TRUE(a.top_left);
    EXPECT_EQ(a.window_left, 200);
    EXPECT_EQ(a.window_right, -1);
    EXPECT_EQ(a.keep_scale, static_cast<float>(4.0 / 3));
    EXPECT_EQ(a.drop_threshold, 65536u / 4);
    EXPECT_EQ(a.seed.value, 41u);
    EXPECT_EQ(a.seed.pointer, raw.seed_ptr);
    EXPECT_EQ(a.offset.value, 43u);
    EXPECT_EQ(a.offset.pointer, nullptr);
    EXPECT_EQ(a.sink, raw.sink->data);
    EXPECT_EQ(a.sink_stride, 1);
    EXPECT_EQ(a.positions.alibi_slopes.data, raw.alibi_slopes->data);
    EXPECT_EQ(a.lse.data, raw.lse->data);
    expect_rows(a.q, raw.q, "q");
    expect_rows(a.k, raw.k, "k");
    expect_rows(a.v, raw.v, "v");
    expect_rows(a.out, raw.out, "out");
    EXPECT_EQ(a.bias.data, raw.bias->data);
    EXPECT_EQ(a.bias.strides.batch1, 6 * 320 * 448);
    EXPECT_EQ(a.bias.strides.head, 320 * 448);
    EXPECT_EQ(a.bias.strides.row, 448);
  }
  const Given given("bwd" + common + "bf16 dlse need=q,k,v,sink");
  const cuda::Args a = args_of(given, "_backward<");
  EXPECT_EQ(a.scale, 0.3F);
  EXPECT_EQ(a.softcap, 7.0F);
  EXPECT_EQ(a.keep_scale, static_cast<float>(4.0 / 3));
  expect_rows(a.q, given.raw.q, "q");
  expect_rows(a.k, given.raw.k, "k");
  expect_rows(a.v, given.raw.v, "v");
  expect_rows(a.grad_out, given.raw.grad_out, "grad_out");
  expect_rows(a.grad_q, given.raw.grad_q, "grad_q");
  expect_rows(a.grad_k, given.raw.grad_k, "grad_k");
  expect_rows(a.grad_v, given.raw.grad_v, "grad_v");
  EXPECT_EQ(a.grad_lse.data, given.raw.grad_lse->data);
  EXPECT_EQ(a.grad_sink, given.raw.grad_sink->data);
}

// A tensor map of each operand: where it begins, how long its dimensions are and how far apart, and that what a
// kernel copies at once is no more than 64 columns of one sequence's head.
TEST_F(DISABLED_PlayedCuda, TensorMapsAreOfTheTensorsGiven) {
  const Given given("fwd b=2x3 hq=8 hk=2 sq=320 sk=448 d=64 dv=128 bf16 bias=b1,h,q,k bias2=1,b2,1,q,k:fp32 lse");
  const fovea_problem& raw = given.raw;
  variable<int>("fake_maps") = 0;
  ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  struct Expected {
    const char* name;
    const fovea_tensor* tensor;
    std::array<std::uint64_t, 5> dims;     // columns, rows, heads, the two levels of the batch
    std::array<std::uint64_t, 4> strides;  // of all but columns, in bytes; 16 where there is one
    bool planes = false;
  };
  const std::vector<Expected> expected = {
      {"q", raw.q, {64, 320, 8, 3, 2}, {8 * 128, 128, 320 * 8 * 128, 3 * 320 * 8 * 128}},
      {"k", raw.k, {64, 448, 2, 3, 2}, {2 * 128, 128, 448 * 2 * 128, 3 * 448 * 2 * 128}},
      {"v", raw.v, {128, 448, 2, 3, 2}, {2 * 256, 256, 448 * 2 * 256, 3 * 448 * 2 * 256}},
      {"out", raw.out, {128, 320, 8, 3, 2}, {8 * 256, 256, 320 * 8 * 256, 3 * 320 * 8 * 256}},
      {"bias", raw.bias, {448, 320, 8, 1, 2}, {448 * 2, 320 * 448 * 2, 16, 8 * 320 * 448 * 2}, true},
      {"bias2", raw.bias2, {448, 320, 1, 3, 1}, {448 * 4, 16, 320 * 448 * 4, 16}, true},
  };
  ASSERT_EQ(static_cast<std::size_t>(variable<int>("fake_maps")), expected.size());
  for (const Expected& e : expected) {
    const Map* found = nullptr;
    for (std::size_t n = 0; n < expected.size(); ++n) {
      const Map& map = (&variable<Map>("fake_map"))[n];
      found = map.address == e.tensor->data ? &map : found;
    }
    ASSERT_NE(found, nullptr) << e.name << ": no map begins at it";
    EXPECT_EQ(found->rank, 5u) << e.name;
    for (std::size_t d = 0; d < 5; ++d) {
      EXPECT_EQ(found->dims[d], e.dims[d]) << e.name << ' ' << d;
      EXPECT_EQ(d > 0 ? found->strides[d - 1] : 0, d > 0 ? e.strides[d - 1] : 0) << e.name << ' ' << d;
      EXPECT_TRUE(d < 2 || found->box[d] == 1) << e.name << ' ' << d;
    }
    const unsigned bytes = e.tensor->dtype == FOVEA_FP32 ? 4 : 2;
    EXPECT_LE(found->box[0] * bytes, 128u) << e.name;  // what a row of a swizzled box has
    EXPECT_EQ(e.dims[0] % found->box[0], 0u) << e.name;
    EXPECT_EQ(found->type, bytes == 4 ? 7 : 9) << e.name;  // CU_TENSOR_MAP_DATA_TYPE_FLOAT32, _BFLOAT16
    EXPECT_EQ(found->swizzle, found->box[0] * bytes == 128 ? 3 : found->box[0] * bytes == 64 ? 2 : 1) << e.name;
  }
}

TEST_F(DISABLED_PlayedCuda, LoadedOnceWhateverThePointers) {
  Given given("bwd b=2 hq=4 sq=128 sk=128 d=96 bf16 causal");
  ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  const int before = loads();
  Given elsewhere("bwd b=2 hq=4 sq=128 sk=128 d=96 bf16 causal");
  elsewhere.raw.stream = &elsewhere;
  launches() = 0;
  ASSERT_EQ(elsewhere.call(), FOVEA_OK);
  EXPECT_EQ(loads(), before);
  EXPECT_GT(launches(), 0);
  EXPECT_EQ(launched()[0].stream, &elsewhere);
}

TEST_F(DISABLED_PlayedCuda, NothingIsLoadedInACapture) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=72 bf16 softcap=3");
  int& capturing = variable<int>("fake_capturing");
  capturing = 1;
  const int before = loads();
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("fovea_prepare"), std::string::npos) << fovea_last_error();
  EXPECT_EQ(loads(), before);
  EXPECT_EQ(given.prepare(), FOVEA_OK);
  EXPECT_GT(loads(), before);
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  capturing = 0;
}

TEST_F(DISABLED_PlayedCuda, EveryContextLoadsBeforeACapture) {
  // A stream of another context of the same device: what is loaded in one is not in the other.
  Given given("fwd b=2 hq=4 sq=128 sk=128 d=80 bf16 softcap=3");
  ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  int other = 0;
  void*& context_of_streams = variable<void*>("fake_context_of_streams");
  context_of_streams = &other;
  given.raw.stream = &given;
  int& capturing = variable<int>("fake_capturing");
  capturing = 1;
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("fovea_prepare"), std::string::npos) << fovea_last_error();
  const int before = variable<int>("fake_loaded_count");
  const int compiled = loads();
  EXPECT_EQ(given.prepare(), FOVEA_OK) << fovea_last_error();
  const int after = variable<int>("fake_loaded_count");
  EXPECT_GT(after, before);
  for (int n = before; n < after; ++n) {
    EXPECT_EQ((&variable<void*>("fake_loaded_into"))[n % (1 << 16)], &other);
  }
  EXPECT_EQ(loads(), compiled);
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  context_of_streams = nullptr;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();  // still loaded in the first
  capturing = 0;
}

TEST_F(DISABLED_PlayedCuda, AForkedChildIsRefusedWhateverItsParentDoes) {
  // Another thread makes plans all the time, and holds their table's lock at some of the forks. Sanitizers run without
  // it: at some forks it would hold a lock of AddressSanitizer's allocator, and the child would wait for that lock
  // (Clang 14, in one of 14 runs).
#if defined(FOVEA_SANITIZED)
  constexpr int kForks = 3;
#else
  constexpr int kForks = 300;
  std::atomic<bool> ends = false;
  std::thread plans([&] {
    for (int n = 1; !ends; ++n) {
      std::size_t bytes = 0;
      const Given given(fmt::format("fwd b=1 hq=1 sq={} sk=16 d=64 bf16", n % 100000 + 1));
      fovea_workspace(&given.raw, FOVEA_FORWARD, &bytes);
    }
  });
#endif
  const Given given("fwd b=1 hq=1 sq=16 sk=17 d=64 bf16");
  for (int n = 0; n < kForks && !HasFailure(); ++n) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);  // ends a child that hangs
      const bool refused =
          given.call() == FOVEA_UNSUPPORTED &&
          std::string(fovea_last_error()).find("forked from one that had used CUDA") != std::string::npos;
      _exit(refused ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "fork " << n << (WIFSIGNALED(status) ? ": the child hung" : ": another answer");
  }
#if !defined(FOVEA_SANITIZED)
  ends = true;
  plans.join();
#endif
}

TEST_F(DISABLED_PlayedCuda, AThreadWithoutAContext) {
  // As PyTorch's, which computes gradients: its first call loads kernels and launches on the default stream.
  int& none = variable<int>("fake_no_context");
  none = 1;
  const Given given("bwd b=2 hq=4 sq=128 sk=128 d=56 bf16");
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  none = 0;
}

TEST_F(DISABLED_PlayedCuda, AnOldGpuIsNamed) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  launches() = 0;
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("played has compute capability 7.0; accepted: 8.0 or newer"),
            std::string::npos)
      << fovea_last_error();
  EXPECT_EQ(launches(), 0);
}

TEST_F(DISABLED_PlayedCuda, ThreadsWaitForOneAnother) {
  const int before = loads();
  std::vector<std::thread> threads;
  std::atomic<int> failed = 0;
  constexpr int kThreads = 8;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const Given given("bwd b=2 hq=4 sq=128 sk=128 d=40 fp16 alibi=h");
      for (int n = 0; n < 50; ++n) {
        failed += given.call() == FOVEA_OK ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(failed, 0);
  EXPECT_LE(loads() - before, 4);  // its kernels, once
}

TEST_F(DISABLED_PlayedCuda, EveryDeviceHasItsOwn) {
  const std::string line = "fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 causal sink";
  EXPECT_EQ(Given(line, 0).call(), FOVEA_OK);
  EXPECT_EQ(Given(line, 1).call(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(Given(line, 2).call(), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("2 was given; 0 to 1 are there"), std::string::npos);
}

TEST_F(DISABLED_PlayedCuda, WhatTheDriverSaysIsSaid) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  ASSERT_EQ(given.call(), FOVEA_OK);
  int& result = variable<int>("fake_result_of_launch");
  result = 700;
  EXPECT_EQ(given.call(), FOVEA_DEVICE_ERROR);
  EXPECT_NE(std::string(fovea_last_error()).find("PLAYED_ERROR 700"), std::string::npos) << fovea_last_error();
  result = 2;
  EXPECT_EQ(given.call(), FOVEA_OUT_OF_MEMORY);
  result = 0;
  EXPECT_EQ(given.call(), FOVEA_OK);
}

TEST_F(DISABLED_PlayedCuda, LengthsAreReadWhereThatIsAskedFor) {
  // FOVEA_CHECK is read once: the parent has set it. Problems without lengths are not concerned.
  Given given("fwd b=2 hq=1 seqs_q=3,4 seqs_k=5,6 total_q=7 total_k=11 max_q=4 max_k=6 d=64 bf16 used_k=5,6");
  std::int64_t cu_q[] = {0, 3, 7};
  std::int64_t cu_k[] = {0, 5, 11};
  std::int32_t used_k[] = {5, 6};
  const auto at = [](const fovea_tensor* tensor, void* data) { const_cast<fovea_tensor*>(tensor)->data = data; };
  at(given.raw.cu_seqlens_q, cu_q);
  at(given.raw.cu_seqlens_k, cu_k);
  at(given.raw.seqused_k, used_k);
  const auto refused = [&](const std::string& message) {
    EXPECT_EQ(given.call(), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(message, 0), 0u) << fovea_last_error();
  };
  int& synchronised = variable<int>("fake_synchronised");
  synchronised = 0;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(synchronised, 1);
  cu_q[0] = 1;
  refused("cu_seqlens_q: begins with 1");
  cu_q[0] = 0;
  cu_q[1] = 8;
  refused("cu_seqlens_q: 8 at index 1; accepted: at most total_q, 7");
  cu_q[1] = 2;
  refused("max_seqlen_q: 4; accepted: at least the longest");
  cu_q[1] = 3;
  used_k[1] = 7;
  refused("seqused_k: 7 at index 1; accepted: 0 to the length of that sequence, 6");
  // Elements that do not lie side by side.
  std::int32_t apart[] = {5, -1, 7, -1};
  at(given.raw.seqused_k, apart);
  auto* const strided = const_cast<fovea_tensor*>(given.raw.seqused_k);
  strided->flags |= FOVEA_TENSOR_STRIDED;
  strided->stride[0] = 2;
  refused("seqused_k: 7 at index 1; accepted: 0 to the length of that sequence, 6");
  apart[2] = 6;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
}

TEST_F(DISABLED_PlayedCuda, PositionsAreReadWhereThatIsAskedFor) {
  Given given("fwd b=2 hq=1 sq=32 sk=48 d=64 bf16 causal pos=16,0 pos_q=32,0 pos_k=16,48 dropout=0.1");
  std::int64_t positions_q[] = {32, 0};
  std::int64_t positions_k[] = {16, 48};
  const_cast<fovea_tensor*>(given.raw.positions_q)->data = positions_q;
  const_cast<fovea_tensor*>(given.raw.positions_k)->data = positions_k;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  const auto refused = [&](const std::string& message) {
    EXPECT_EQ(given.call(), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(message, 0), 0u) << fovea_last_error();
  };
  positions_q[1] = 7;
  refused("position_q + positions_q[1]: 23; accepted with dropout: a multiple of 16");
  positions_q[1] = -32;
  refused("position_q + positions_q[1]: -16 with up to 32 rows; accepted with dropout: positions of 0");
  positions_q[1] = 0;
  positions_k[0] = std::int64_t{1} << 40;
  refused("positions_k: 1099511627776 at index 0, added to 0; accepted: under 2^40");
}

TEST_F(DISABLED_PlayedCuda, MemoryOfTheHostIsNamedWhereThatIsAskedFor) {
  Given given("bwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=1,h,q,k:fp32 need=q,bias");
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  launches() = 0;
  for (const auto& [name, tensor] : {std::pair("k", given.raw.k), std::pair("grad_bias", given.raw.grad_bias)}) {
    variable<void*>("fake_host") = tensor->data;
    EXPECT_EQ(given.call(), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()),
              fmt::format("{}: memory of the host; accepted: memory of CUDA device 0, managed or pinned memory", name));
  }
  EXPECT_EQ(launches(), 0);
  variable<void*>("fake_host") = nullptr;
}

TEST_F(DISABLED_PlayedCuda, WhatIsPreparedMayAskForClearedRows) {
  const std::string line = "fwd b=2 hq=1 seqs_q=13,4 seqs_k=15,6 total_q=17 total_k=21 max_q=13 max_k=15 d=24 fp16";
  int& capturing = variable<int>("fake_capturing");
  for (const bool clears : {false, true}) {
    const std::string one = line + (clears ? " softcap=3" : "");
    EXPECT_EQ(Given(one + (clears ? " clear" : "")).prepare(), FOVEA_OK) << fovea_last_error();
    capturing = 1;
    EXPECT_EQ(Given(one + (clears ? "" : " clear")).call(), FOVEA_OK) << fovea_last_error();
    capturing = 0;
  }
}

TEST_F(DISABLED_PlayedCuda, WithoutHeads) {
  for (const char* const features : {"", " causal", " bias=1,1,q,k"}) {
    for (const char* const heads : {"hq=0 hk=0", "hq=0 hk=2"}) {
      for (const char* const rows : {"sq=40 sk=90", "seqs_q=13,4 seqs_k=15,6"}) {
        for (const char* const direction : {"fwd", "bwd"}) {
          const std::string line = fmt::format("{} b=2 {} {} d=64 bf16{}", direction, heads, rows, features);
          EXPECT_EQ(Given(line).call(), FOVEA_OK) << line << ": " << fovea_last_error();
        }
      }
    }
  }
}

TEST_F(DISABLED_PlayedCuda, WithAnUnknownValueOfFoveaCheck) {
  EXPECT_EQ(Given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16").call(), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()), "FOVEA_CHECK: 'yes'; accepted: 0, 1");
  EXPECT_EQ(launches(), 0);
}

std::string explained(const Given& given, fovea_status expected) {
  char text[4096] = "";
  EXPECT_EQ(fovea_explain(&given.raw, given.direction(), text, sizeof text, nullptr), expected) << fovea_last_error();
  return text;
}

TEST_F(DISABLED_PlayedCuda, ExplainSaysWhichBackendIsUsed) {
  launches() = 0;
  const std::string text = explained(Given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16"), FOVEA_OK);
  EXPECT_NE(text.find("\ncuda: used: sm90_forward"), std::string::npos) << text;
  EXPECT_EQ(launches(), 0);
}

TEST_F(DISABLED_PlayedCuda, WithNothingToCompileExplainSaysThatACallWouldFail) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  const std::string why = fovea_last_error();
  EXPECT_EQ(why.rfind("FOVEA_JIT=off: no machine code of fovea::cuda::sm90_forward", 0), 0u) << why;
  const std::string text = explained(given, FOVEA_UNSUPPORTED);
  EXPECT_NE(text.find("\ncuda: not used: " + why), std::string::npos) << text;
  EXPECT_EQ(text.find(": used"), std::string::npos) << text;
}

TEST_F(DISABLED_PlayedCuda, AWorkspaceThatIsTooSmall) {
  const Given given("bwd b=2 hq=4 sq=1024 sk=1024 d=64 bf16");
  launches() = 0;
  EXPECT_EQ(fovea_backward(&given.raw, nullptr, 0), FOVEA_OUT_OF_MEMORY);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("workspace: 0 bytes", 0), 0u) << fovea_last_error();
  EXPECT_EQ(launches(), 0);
}

TEST_F(DISABLED_PlayedCuda, BackendsAndExplain) {
  char text[4096] = "";
  ASSERT_EQ(fovea_backends(text, sizeof(text), nullptr), FOVEA_OK);
  EXPECT_NE(std::string(text).find("cuda\tavailable\n"), std::string::npos) << text;
  ASSERT_EQ(fovea_machine(text, sizeof(text), nullptr), FOVEA_OK);
  const std::string machine = text;
  for (const char* const line : {"driver\tCUDA 13.0\n", "GPU\t0: ", "GPU\t1: ", "compute capability 9.0, 132 multi",
                                 "NVRTC\t13.", "libnvrtc.so.13 (found by FOVEA_NVRTC)\n", "kernel cache\tnone\n"}) {
    EXPECT_NE(machine.find(line), std::string::npos) << line << " is not in\n" << machine;
  }
  ASSERT_EQ(fovea_explain_line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 device=cuda", text, sizeof(text), nullptr),
            FOVEA_OK);
  EXPECT_NE(std::string(text).find("cuda: used: "), std::string::npos) << text;
  EXPECT_EQ(
      fovea_explain_line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 device=cuda backend=cpu", text, sizeof(text), nullptr),
      FOVEA_UNSUPPORTED);
}

}  // namespace
}  // namespace fovea
