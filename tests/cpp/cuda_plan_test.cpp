// SPDX-License-Identifier: Apache-2.0
//
// Plans of the CUDA backend, which need no GPU: tiles and grids against a file of golden lines, what is prepared for
// which tensors, the workspace, and what holds for every row of the case table on every architecture.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "check/cases.h"
#include "core/fields.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/config/packed_heads.h"
#include "cuda/config/print.h"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/executable.h"
#include "cuda/kernels/sm90_backward.h"
#include "cuda/kernels/sm90_backward_order.h"
#include "cuda/plan/known_features.h"

namespace fovea::cuda {
namespace {

struct Line {
  explicit Line(const std::string& text) : problem(parse(text + " device=cuda")), shapes(problem) {
    call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
  }
  Problem problem;
  Shapes shapes;
  Call call;
};

Plan plan_of_line(const std::string& text, const std::string& architecture = "sm_90") {
  return plan_for(Line(text).call, target_of(architecture));
}

// The first launch of a kernel of this name.
const Launch* find(const Plan& plan, std::string_view kernel) {
  for (const Launch& launch : plan.launches) {
    if (launch.kernel.name == kernel) {
      return &launch;
    }
  }
  return nullptr;
}

std::vector<Problem> both_directions_of_the_table() {
  std::vector<Problem> problems;
  for (const check::Case& c : check::cases(check::Table::kFull)) {
    if (c.problem.type == DType::kFp64) {
      continue;
    }
    for (Problem problem : {c.problem, check::forward_of(c.problem)}) {
      problem.device = FOVEA_CUDA;
      problems.push_back(problem);
    }
  }
  return problems;
}

// ---- Spec as text ----

struct Anything {
  template <class T>
  constexpr operator T() const;  // NOLINT(google-explicit-constructor)
};
template <class T, class... Fields>
constexpr int fields_of() {
  if constexpr (requires { T{Fields{}..., Anything{}}; }) {
    return fields_of<T, Fields..., Anything>();
  } else {
    return sizeof...(Fields);
  }
}

template <class Part>
class CudaSpecPart : public ::testing::Test {};
using Parts = ::testing::Types<Features, PositionTerms, Gradients, AroundSpec, ForwardTiles, WideForwardTiles,
                               BackwardTiles, Sm90ForwardTiles, Sm90BackwardTiles, Sm90BiasTiles, Sm90SmallTiles>;
TYPED_TEST_SUITE(CudaSpecPart, Parts);

TYPED_TEST(CudaSpecPart, EveryFieldIsPrinted) {
  int visited = 0;
  std::set<std::string> names;
  for_each_field(TypeParam{}, [&](const char* name, const auto&, const auto&) {
    ++visited;
    names.insert(name);
  });
  EXPECT_EQ(visited, fields_of<TypeParam>());
  EXPECT_EQ(names.size(), static_cast<std::size_t>(visited));
}

TYPED_TEST(CudaSpecPart, FieldsArePrintedInTheOrderOfTheirDeclaration) {
  // A designated initialiser in another order does not compile.
  const TypeParam part;
  const void* before = nullptr;
  for_each_field(part, [&](const char* name, const auto& field, const auto&) {
    EXPECT_LT(before, &field) << name;
    before = &field;
  });
}

TEST(CudaKernel, FamiliesAreCompared) {
  EXPECT_EQ(family_of("sm90_forward"), 90);
  EXPECT_EQ(family_of("sm100_forward"), 100);
  EXPECT_EQ(family_of("sm80"), 80);
  for (const char* const generic : {"generic", "generic_forward", "prepare_pack", "reduce_sink", "small"}) {
    EXPECT_EQ(family_of(generic), 80) << generic;
  }
}

TEST(CudaOperands, UnknownTypesAreRefused) {
  EXPECT_EQ(type_of(DType::kFp32), Type::kFp32);
  EXPECT_EQ(tile_of(DType::kFp16), BiasTile::kFp16);
  for (const DType type : {DType::kNone, DType::kFp64, DType::kBool, DType::kInt32, static_cast<DType>(99)}) {
    EXPECT_THROW(type_of(type), Error) << static_cast<int>(type);
    EXPECT_THROW(tile_of(type), Error) << static_cast<int>(type);
  }
}

TEST(CudaPlan, ABiasThatMoreHeadsShareThanAnIntCounts) {
  const std::string line = "bwd b=65536 hq={} sq=1 sk=1 d=16 bf16 bias=1,1,q,k";
  EXPECT_NO_THROW(plan_of_line(fmt::format(fmt::runtime(line), 32767)));
  try {
    plan_of_line(fmt::format(fmt::runtime(line), 32768));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), FOVEA_UNSUPPORTED);
    EXPECT_EQ(std::string(error.what()), "bias: a gradient that 2147483648 heads share; accepted: at most 2147483647");
  }
}

TEST(CudaSpec, AsATemplateArgument) {
  EXPECT_EQ(print(AroundSpec{}), "fovea::cuda::AroundSpec{}");
  EXPECT_EQ(print(ForwardSpec{}), "fovea::cuda::ForwardSpec{{}, {}}");
  ForwardSpec spec;
  spec.arch = 90;
  spec.type = Type::kFp16;
  spec.d = 128;
  spec.bias = BiasTile::kFp32;
  spec.dropout = DropoutRule::kFovea;
  spec.lazy = true;
  EXPECT_EQ(print(spec),
            "fovea::cuda::ForwardSpec{{.arch = 90, .type = fovea::cuda::Type::kFp16, .d = 128, .bias = "
            "fovea::cuda::BiasTile::kFp32, .dropout = fovea::cuda::DropoutRule::kFovea}, {.lazy = true}}");
}

// ---- targets ----

TEST(CudaTarget, ArchitecturesByName) {
  EXPECT_EQ(target_of("sm_80").capability, 80);
  EXPECT_EQ(target_of("sm_90a").architecture(), "sm_90");
  EXPECT_EQ(target_of("sm_90").architecture(true), "sm_90a");
  try {
    targets_of("sm_75");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), FOVEA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("'sm_75'; accepted: sm_80, "), std::string::npos) << error.what();
  }
}

// ---- golden ----

std::string text_of(const std::string& line, const std::string& architecture) {
  std::string text = fmt::format("{}: {}\n", architecture, line);
  const Plan plan = plan_of_line(line, architecture);
  for (const Launch& launch : plan.launches) {
    text += fmt::format("  {}<{}> {} blocks{} of {} threads, {} bytes\n", launch.kernel.name, print(launch.kernel.spec),
                        launch.blocks, launch.blocks_y > 1 ? fmt::format(" x {}", launch.blocks_y) : "",
                        launch.kernel.threads, launch.kernel.shared_bytes);
  }
  return text + fmt::format("  workspace {} bytes\n", plan.workspace.bytes());
}

TEST(CudaPlan, Golden) {
  const char* const kFile = FOVEA_SOURCE_DIR "/tests/cpp/golden/cuda_plans.txt";
  constexpr const char* kLines[] = {
      "fwd b=4 hq=32 sq=4096 sk=4096 d=64 bf16 lse",
      "fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal lse",
      "fwd b=2 hq=8 sq=2048 sk=2048 d=128 fp16 bias=1,h,q,k dropout=0.1 lse",
      "fwd b=2 hq=8 sq=2048 sk=2048 d=64 fp32 lse",
      "fwd b=1 hq=8 sq=2048 sk=2048 d=256 bf16 lse",
      "fwd b=1 hq=8 sq=2048 sk=2048 d=512 bf16 lse",
      "fwd b=1 hq=8 hk=1 sq=1 sk=32768 d=128 bf16 causal",
      "fwd b=2 hq=16 sq=64 sk=3412 d=192 bf16 lse",
      "fwd b=2 hq=4 sq=333 sk=461 d=77 bf16 mask=b,h,q,k bias=b,1,1,k bias2=1,h,q,1:fp32",
      "bwd b=4 hq=32 sq=4096 sk=4096 d=64 bf16",
      "bwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal det",
      "bwd b=2 hq=8 sq=2048 sk=2048 d=128 bf16 bias=1,h,q,k",
      "bwd b=2 hq=8 sq=2048 sk=2048 d=64 fp32 sink bias=b,1,1,k bias2=1,h,q,1",
      "bwd b=1 hq=8 sq=2048 sk=2048 d=512 bf16 need=q",
      "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=b,h,q,k",
      "bwd b=512 hq=8 sq=384 sk=384 d=32 bf16 bias=1,h,q,k bias2=b,1,1,k",
      "bwd b=4096 hq=4 sq=49 sk=49 d=32 bf16 bias=1,h,q,k",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=64 fp16 dropout=0.1 causal det",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=128 bf16 mask=b,1,q,k",
      "bwd b=16 hq=16 sq=4096 sk=77 d=64 bf16",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=256 bf16 causal",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=192 dv=128 bf16 causal",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=192 bf16 bias=1,h,q,k need=q,k,v",
      "bwd b=8 hq=16 sq=2048 sk=2048 d=80 bf16 causal",
      "bwd b=2 hq=16 sq=8192 sk=8192 d=128 bf16 causal",
      "bwd b=4 hq=16 sq=2048 sk=2048 d=112 dv=128 bf16 causal",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=256 bf16 causal det",
      "bwd b=4 hq=16 sq=8192 sk=8192 d=256 bf16",
      "bwd b=4 hq=16 sq=4096 sk=4096 d=128 bf16",
      "bwd b=4 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal",
      "bwd b=8 hq=16 sq=2047 sk=2047 d=64 bf16 bias=b,h,q,k",
      "bwd b=8 hq=16 sq=2047 sk=2047 d=64 bf16 bias=1,h,q,k",
      "bwd b=4 hq=8 hk=1 sq=1254 sk=1254 d=40 fp16 causal",
      "bwd b=1 hq=4 hk=1 sq=1664 sk=1664 d=192 bf16",
      "fwd b=2 hq=8 sq=2048 sk=2048 d=128 bf16 softcap=30 causal lse",
      "fwd b=2 hq=8 sq=2048 sk=2048 d=128 bf16 softcap=30 bias=1,h,q,k lse",
      "fwd b=2 hq=8 sq=2048 sk=2048 d=128 bf16 softcap=30 alibi=h dropout=0.1 lse",
      "fwd b=2 hq=8 sq=2048 sk=2048 d=128 bf16 scale=-0.1 lse",
      "bwd b=2 hq=8 sq=2048 sk=2048 d=128 bf16 scale=-0.1 causal",
      "fwd b=2 hq=8 hk=2 sq=1 sk=100 d=64 bf16 causal align=tl",
      "fwd b=2 hq=8 hk=2 sq=1 sk=100 d=64 bf16 causal",
      "fwd b=2 hq=32 hk=8 sq=2048 sk=4096 d=128 bf16 causal pos=2048,0 lse",
      "fwd b=2 hq=32 hk=8 sq=2048 sk=4096 d=128 bf16 pos=2048,0",
      "bwd b=2 hq=32 hk=8 sq=2048 sk=4096 d=128 bf16 causal pos=2048,0 dropout=0.1 streams=b,h",
      "bwd b=2 hq=8 sq=2048 sk=4096 d=64 bf16 alibi=h pos_q pos_k bias=1,h,q,k",
      "bwd b=2 hq=8 sq=2048 sk=4096 d=64 fp16 dropout=0.1 streams=1,h",
      "fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal pos=4096,0 lse wide=out add=out",
      "fwd b=1 hq=8 sq=2048 sk=2048 d=512 bf16 wide=out",
      "bwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal pos=4096,0 wide=k,v add=k,v",
      "bwd b=4 hq=16 sq=8192 sk=8192 d=128 bf16 causal wide=k,v",
      "bwd b=4 hq=16 sq=2048 sk=2048 d=80 bf16 causal wide=out,q add=q",
      "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=b,h,q,k sink wide=bias add=bias,sink",
      "bwd b=4096 hq=4 sq=49 sk=49 d=32 bf16 bias=1,h,q,k wide=q,bias add=bias",
      "bwd b=1 hq=8 sq=2048 sk=2048 d=512 bf16 wide=q,k,v add=q,k,v",
      "bwd b=8 hq=16 sq=2048 sk=2048 d=128 bf16",
      "fwd b=1 hq=8 sq=3456 sk=3296 d=64 bf16 bias=1,h,q,k lse",
      "bwd b=1 hq=10 sq=2048 sk=2048 d=128 bf16",
      ("bwd b=2 hq=16 d=128 bf16 causal seqs_q=1024,3000 total_q=4024 max_q=3000 seqs_k=1024,3000 total_k=4024 "
       "max_k=3000"),
      "bwd b=8 hq=16 d=128 bf16 causal seqs_q=2048x8 seqs_k=2048x8",
  };
  std::string text;
  for (const char* architecture : {"sm_80", "sm_90", "sm_120"}) {
    for (const char* line : kLines) {
      text += text_of(line, architecture);
    }
  }
  if (std::getenv("FOVEA_WRITE_GOLDEN") != nullptr) {
    std::ofstream(kFile) << text;
  }
  std::stringstream golden;
  golden << std::ifstream(kFile).rdbuf();
  EXPECT_EQ(text, golden.str())
      << "where that is meant: FOVEA_WRITE_GOLDEN=1 fovea_tests --gtest_filter=CudaPlan.Golden";
}

// What Hopper's kernels leave to the generic ones of the case table's rows, in both directions, and of longer problems:
// each reason once, by the kernel that gives it.
TEST(CudaPlan, WhatHopperLeaves) {
  const char* const kFile = FOVEA_SOURCE_DIR "/tests/cpp/golden/sm90_leaves.txt";
  std::vector<Problem> problems = both_directions_of_the_table();
  for (const char* line : {
           "fwd b=1 hq=8 sq=64 sk=64 d=320 bf16",
           "fwd b=1 hq=8 hk=1 sq=1 sk=32768 d=128 bf16",
           "bwd b=1 hq=8 sq=512 sk=512 d=320 bf16 bias=1,h,q,k need=q,k,v,bias",
           "bwd b=1 hq=8 sq=512 sk=512 d=64 fp32 bias=1,h,q,k need=q,k,v,bias",
           "bwd b=2 hq=8 sq=512 sk=512 d=128 bf16 need=q det",
           "bwd b=2 hq=8 sq=512 sk=512 d=192 bf16 need=q",
           "bwd b=2 hq=8 sq=512 sk=512 d=128 bf16 softcap=30 bias=1,1,1,k need=q,k,v,bias",
           "bwd b=2 hq=8 sq=512 sk=512 d=128 bf16 dropout=0.1 bias=b,h,q,1 need=q,k,v,bias",
           "bwd b=2 hq=8 sq=512 sk=512 d=128 bf16 dropout=0.1 rng=torch_mem_efficient",
           "bwd b=2 hq=8 sq=512 sk=512 d=192 bf16 bias=1,1,1,k need=q,k,v,bias",
           "bwd b=2 hq=8 sq=512 sk=512 d=256 bf16 bias=1,h,q,k:fp32",
           "bwd b=2 hq=8 sq=512 sk=512 d=256 bf16 bias=b,h,q,1",
           "bwd b=65 hq=4 sq=49 sk=49 d=160 bf16 bias=1,h,q,k need=q,k,v,bias",
       }) {
    problems.push_back(Line(line).problem);
  }
  const Target target = target_of("sm_90");
  std::set<std::string> reasons;
  for (const Problem& problem : problems) {
    const Shapes shapes(problem);
    const std::string summary =
        plan_for(validate(shapes.get(), problem.direction, /*shapes_only=*/true), target).summary;
    const std::string separator = "; ";
    for (std::size_t begin = 0; begin < summary.size();) {
      const std::size_t end = std::min(summary.find(separator, begin), summary.size());
      const std::string part = summary.substr(begin, end - begin);
      if (part.starts_with("sm90_") && part.find(": ") != std::string::npos) {
        reasons.insert(part);
      }
      begin = end + separator.size();
    }
  }
  std::string text;
  for (const std::string& reason : reasons) {
    text += reason + "\n";
  }
  if (std::getenv("FOVEA_WRITE_GOLDEN") != nullptr) {
    std::ofstream(kFile) << text;
  }
  std::stringstream golden;
  golden << std::ifstream(kFile).rdbuf();
  EXPECT_EQ(text, golden.str())
      << "where that is meant: FOVEA_WRITE_GOLDEN=1 fovea_tests --gtest_filter=CudaPlan.WhatHopperLeaves";
}

// The heads that read one key head are the queries of one head, where nothing tells them apart.
TEST(CudaPlan, EveryFieldHasBeenConsideredWhereHeadsAreComputedAsQueries) {
  // A term that tells the heads of a group, or a query from others, apart must stop packs_heads(), which would compute
  // it for the wrong query or head.
  const std::set<std::string> stops = {"direction",
                                       "seqlen_q",
                                       "packed",
                                       "total_q",
                                       "total_k",
                                       "has_used_q",
                                       "window_left",
                                       "top_left",
                                       "alibi",
                                       "sink",
                                       "dropout",
                                       "rng",
                                       "seed",
                                       "offset",
                                       "positions",
                                       "position_q",
                                       "position_k",
                                       "has_positions_q",
                                       "has_positions_k",
                                       "dropout_streams"};
  const std::set<std::string> same_for_all = {
      "batch1",  "batch2",     "heads_q",    "heads_k",       "seqlen_k", "head_dim",  "type", "scale",
      "softcap", "head_dim_v", "bias",       "bias2",         "mask",     "causal",    "lse",  "window_right",
      "need",    "grad_lse",   "has_used_k", "deterministic", "wide",     "accumulate"};
  const Problem usual;
  for_each_field(usual, [&](const std::string& name, const auto&, Role role) {
    const bool matters = role == Role::kPlan || role == Role::kNumber;
    EXPECT_EQ(matters, stops.count(name) + same_for_all.count(name) == 1)
        << name << ": may heads of a group that have it be computed as queries of one head (config/packed_heads.cpp)?";
  });
}

TEST(CudaPlan, OneQueryOfGroupedHeads) {
  const std::string packed = "b=2 hq=2 hk=2 sq=4 sk=4096 d=128 bf16";
  const std::string one = "b=2 hq=8 hk=2 sq=1 sk=4096 d=128 bf16";
  const auto kernels = [](const std::string& line) {
    std::string text;
    for (const Launch& launch : plan_of_line("fwd " + line).launches) {
      text += fmt::format("{}<{}> {} ", launch.kernel.name, print(launch.kernel.spec), launch.blocks);
    }
    return text;
  };
  for (const char* same :
       {"", " causal", " window=-1,3", " mask=b,1,1,k", " mask=b,1,q,k", " softcap=30", " used_k=7,4000"}) {
    const std::string text = same;
    const bool of_keys = text.find("causal") != std::string::npos || text.find("window") != std::string::npos;
    const std::string plain = text.find("mask") != std::string::npos ? " mask=b,1,1,k" : of_keys ? "" : text;
    EXPECT_EQ(kernels(one + text), kernels(packed + plain)) << text;
  }
  for (const char* other : {" sink", " alibi=h", " dropout=0.1", " bias=1,h,1,k", " mask=b,h,1,k", " window=5,0",
                            " causal align=tl", " causal pos=4095,0", " used_q=1,0"}) {
    EXPECT_FALSE(packs_heads(Line("fwd " + one + other).call)) << other;
  }
  const Line line("fwd " + one + " lse");
  const Call call = with_packed_heads(line.call);
  EXPECT_EQ(call.rows.heads_q, 2);
  EXPECT_EQ(call.rows.rows_q, 4);
  EXPECT_EQ(call.q.strides.row, line.call.q.strides.head);
  EXPECT_EQ(call.q.strides.head, 4 * line.call.q.strides.head);
  EXPECT_EQ(call.lse.strides.row, line.call.lse.strides.head);
}

// ---- what is prepared ----

TEST(CudaPlan, AlignedTensorsAreReadWhereTheyAre) {
  const Plan plan = plan_of_line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=b,h,q,k");
  ASSERT_EQ(plan.launches.size(), 1u);
  EXPECT_EQ(plan.operands.q.region, Region::kNone);
  EXPECT_EQ(plan.operands.bias.region, Region::kNone);
  EXPECT_TRUE(plan.operands.vector_stores);
}

TEST(CudaPlan, OthersArePacked) {
  Line line("fwd b=2 hq=4 sq=128 sk=130 d=60 bf16 bias=1,h,q,k");
  const Plan plan = plan_for(line.call, target_of("sm_90"));
  const Launch* pack = find(plan, "prepare_pack");
  ASSERT_NE(pack, nullptr);
  EXPECT_EQ(pack->blocks_y, 4u);  // q, k, v, bias
  EXPECT_EQ(plan.operands.head_dim, 64);
  EXPECT_EQ(plan.operands.q.strides.row, 64);
  EXPECT_EQ(plan.operands.bias.strides.row, 136);  // of 16 bytes
  EXPECT_EQ(plan.operands.bias.strides.batch1, 0);
  EXPECT_FALSE(plan.operands.vector_stores);

  Line aligned("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  EXPECT_EQ(plan_for(aligned.call, target_of("sm_90")).workspace.bytes(), 0);
  aligned.call.k.data = reinterpret_cast<void*>(2);
  EXPECT_EQ(plan_for(aligned.call, target_of("sm_90")).operands.k.region, Region::kK);
}

TEST(CudaPlan, RowsThatRunBackwardsOrFarApartArePacked) {
  const auto region_of_q = [](std::int64_t row) {
    Line line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=b,h,q,k");
    line.call.q.strides.row = row;
    return plan_for(line.call, target_of("sm_80")).operands.q.region;
  };
  EXPECT_EQ(region_of_q(kRowBytesLimit / 2 - 8), Region::kNone);
  EXPECT_EQ(region_of_q(kRowBytesLimit / 2), Region::kQ);
  EXPECT_EQ(region_of_q(-256), Region::kQ);
  Line line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=b,h,q,k");
  line.call.bias.strides.row = -128;
  EXPECT_EQ(plan_for(line.call, target_of("sm_80")).operands.bias.region, Region::kBias);
}

TEST(CudaPlan, BiasesByWhatTheyReallyHave) {
  Line line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=b,h,q,k bias2=1,h,q,1:fp32 mask=b,1,1,k");
  const Operands& all = plan_for(line.call, target_of("sm_80")).operands;
  EXPECT_EQ(all.features.bias, BiasTile::kBf16);
  EXPECT_EQ(all.features.bias2, BiasTile::kNone);
  EXPECT_TRUE(all.features.query_term);
  EXPECT_TRUE(all.features.key_term);
  EXPECT_FALSE(all.features.mask);
  EXPECT_EQ(all.query_term.strides.row, 1);
  EXPECT_EQ(all.key_term.strides.col, 1);
  EXPECT_EQ(all.key_term.strides.head, 0);
  const Operands& bits = plan_for(line.call, target_of("sm_90")).operands;  // sm90_forward has no term for a mask
  EXPECT_FALSE(bits.features.key_term);
  EXPECT_TRUE(bits.features.mask && bits.features.key_mask);
  EXPECT_EQ(bits.mask.strides.row, 0);
  line.call.bias.strides.row = 0;  // expanded by the caller
  const Operands expanded = plan_for(line.call, target_of("sm_80")).operands;
  EXPECT_EQ(expanded.features.bias, BiasTile::kNone);
  ASSERT_EQ(expanded.terms.size(), 2u);
  EXPECT_EQ(expanded.terms[0].biases.size(), 1u);
}

TEST(CudaPlan, AMaskOfKeysAloneLeavesTheScoresInTheirUnits) {
  const auto key_mask = [](const std::string& line) {
    const Plan plan = plan_for(Line(line).call, target_of("sm_80"));
    return find(plan, "generic_forward")->kernel.as<ForwardSpec>().key_mask;
  };
  EXPECT_TRUE(key_mask("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 mask=b,1,1,k"));
  EXPECT_FALSE(key_mask("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=b,1,1,k"));
  EXPECT_FALSE(key_mask("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=b,1,1,k mask=b,1,1,k"));
  EXPECT_FALSE(key_mask("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 mask=b,h,q,k"));
}

// The planted fault: a plan that gives a kernel a feature which its text does not read.
TEST(CudaPlan, AFeatureThatAKernelDoesNotKnowIsRefused) {
  const Line line("bwd b=2 hq=2 sq=49 sk=49 d=32 bf16");
  const Target target = target_of("sm_90");
  const Plan plan = plan_for(line.call, target);
  const Launch* const small = find(plan, "sm90_small_backward");
  ASSERT_NE(small, nullptr);
  EXPECT_EQ(unknown_feature(small->kernel), nullptr);
  const auto with = [&](auto change) {
    Kernel kernel = small->kernel;
    change(std::get<Sm90SmallSpec>(kernel.spec));
    return kernel;
  };
  const std::pair<const char*, Kernel> planted[] = {
      {"softcap", with([](Features& s) { s.softcap = true; })},
      {"mask", with([](Features& s) { s.mask = true; })},
      {"positions", with([](Features& s) { s.positions.alibi = true; })},
      {"dropout", with([](Features& s) { s.dropout = DropoutRule::kFovea; })},
      {"fp32_results", with([](Features& s) { s.fp32_results = true; })}};
  for (const auto& [name, kernel] : planted) {
    ASSERT_STREQ(unknown_feature(kernel), name);
    Planner planner(line.call, target);
    try {
      planner.add(kernel, 1, small->start);
      ADD_FAILURE() << name << " is ignored";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                fmt::format("sm90_small_backward: {}, which this kernel does not know", name));
    }
  }
  EXPECT_EQ(unknown_feature(with([](Features& s) { s.bias = BiasTile::kBf16; })), nullptr);
}

TEST(CudaPlan, MaskBits) {
  const Plan plan = plan_of_line("fwd b=2 hq=4 sq=100 sk=130 d=64 bf16 mask=1,h,q,k");
  EXPECT_TRUE(plan.operands.features.mask);
  EXPECT_EQ(plan.operands.mask.strides.row, 8);  // words: five, in pieces of 16 bytes
  EXPECT_EQ(plan.workspace.size(Region::kMaskBits), 4 * 100 * 8 * 4);
}

TEST(CudaPlan, OnlyWhatIsAskedForIsComputed) {
  const auto steps = [](const std::string& line) {
    std::set<std::string> steps;
    for (const Launch& launch : plan_of_line(line, "sm_80").launches) {
      steps.insert(launch.kernel.name);
    }
    return steps;
  };
  using Steps = std::set<std::string>;
  const std::string line = "bwd b=2 hq=4 sq=128 sk=128 d=64 bf16 sink bias=1,h,q,k bias2=b,1,1,k ";
  EXPECT_EQ(steps(line + "need=q"), (Steps{"prepare_term", "backward_prepare", "generic_backward_dq"}));
  EXPECT_EQ(steps(line + "need=k"), (Steps{"prepare_term", "backward_prepare", "generic_backward"}));
  EXPECT_EQ(steps(line + "need=q,k"),
            (Steps{"prepare_term", "backward_prepare", "generic_backward", "backward_convert"}));
  EXPECT_EQ(steps(line + "need=q,k det"),
            (Steps{"prepare_term", "backward_prepare", "generic_backward", "generic_backward_dq"}));
  EXPECT_EQ(steps(line + "need=bias2"),
            (Steps{"prepare_term", "backward_prepare", "generic_backward", "reduce_columns"}));
  EXPECT_EQ(steps(line + "need=sink"), (Steps{"prepare_term", "backward_prepare", "reduce_sink"}));
  EXPECT_TRUE(steps(line + "need=bias").count("generic_bias_gradient"));
}

TEST(CudaPlan, GradientsOfBiasesOnHopper) {
  const auto gradients = [](const std::string& line) {
    std::vector<Kernel> kernels;
    for (const Launch& launch : plan_of_line(line).launches) {
      if (launch.kernel.name == std::string_view("sm90_bias_gradient")) {
        kernels.push_back(launch.kernel);
      }
    }
    return kernels;
  };
  // A bias that heads share is taken out of the sum, and tiles that overflow are computed again.
  const std::vector<Kernel> shared = gradients("bwd b=8 hq=4 sq=512 sk=512 d=64 bf16 bias=1,h,q,k");
  ASSERT_EQ(shared.size(), 2u);
  EXPECT_TRUE(shared[0].as<Sm90BiasSpec>().bias_outside);
  EXPECT_FALSE(shared[1].as<Sm90BiasSpec>().bias_outside);
  EXPECT_EQ(shared[0].as<Sm90BiasSpec>().warps, shared[1].as<Sm90BiasSpec>().warps);
  EXPECT_EQ(shared[0].as<Sm90BiasSpec>().step, shared[1].as<Sm90BiasSpec>().step);
  EXPECT_EQ(gradients("bwd b=8 hq=4 sq=512 sk=512 d=64 bf16 bias=1,h,q,k softcap=5").size(), 1u);
  EXPECT_EQ(gradients("bwd b=8 hq=4 sq=512 sk=512 d=64 bf16 bias=1,h,q,k bias2=b,1,1,k").size(), 2u);
  // The second bias takes the first one's place.
  const std::vector<Kernel> second =
      gradients("bwd b=8 hq=4 sq=512 sk=512 d=64 bf16 bias=b,1,q,k:fp32 bias2=1,h,q,k need=bias2");
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].as<Sm90BiasSpec>().bias, BiasTile::kBf16);
  EXPECT_EQ(second[0].as<Sm90BiasSpec>().bias2, BiasTile::kFp32);
  // Packed sequences under a band, a second bias and two features more: 64 keys a tile, which compile sooner.
  const std::string longest =
      "bwd b=4 hq=2 d=64 bf16 seqs_q=100,50,0,17 seqs_k=100,50,0,17 bias=1,h,q,k bias2=b,h,q,k need=bias ";
  EXPECT_EQ(gradients(longest + "causal alibi=h mask=b,1,1,k").at(0).as<Sm90BiasSpec>().step, 64);
  EXPECT_EQ(gradients(longest + "alibi=h mask=b,1,1,k").at(0).as<Sm90BiasSpec>().step, 128);
  EXPECT_EQ(gradients(longest + "causal alibi=h").at(0).as<Sm90BiasSpec>().step, 128);
  // What nothing shares is dS.
  const std::string own = "bwd b=8 hq=4 sq=512 sk=512 d=64 bf16 bias=b,h,q,k ";
  EXPECT_TRUE(gradients(own).empty());
  EXPECT_TRUE(find(plan_of_line(own), "sm90_backward")->kernel.as<Sm90BackwardSpec>().dbias_store);
  for (const char* feature : {"causal", "softcap=5", "used_k=9,9,9,9,9,9,9,9", "need=k,bias"}) {
    EXPECT_EQ(gradients(own + feature).size(), 1u) << feature;
  }
  // Short sequences.
  const Plan small = plan_of_line("bwd b=512 hq=4 sq=49 sk=49 d=32 bf16 bias=1,h,q,k");
  EXPECT_TRUE(find(small, "sm90_small_backward") != nullptr && find(small, "small_bias_sum") != nullptr);
  EXPECT_EQ(find(small, "backward_prepare"), nullptr);
  const std::string planes = "hq=4 sq=49 sk=49 d=32 bf16 bias=b1,1,h,q,k";  // whose sums take much memory
  EXPECT_EQ(find(plan_of_line("bwd b=1000x40 " + planes), "sm90_small_backward"), nullptr);
  EXPECT_NE(find(plan_of_line("bwd b=10x40 " + planes), "sm90_small_backward"), nullptr);
  for (const char* other : {"sk=65", "sk=49 hk=2", "sk=49 dropout=0.1", "sk=49 sink", "sk=49 bias2=b,1,1,k"}) {
    EXPECT_EQ(
        find(plan_of_line(std::string("bwd b=512 hq=4 sq=49 d=32 bf16 bias=1,h,q,k ") + other), "sm90_small_backward"),
        nullptr)
        << other;
  }
}

// A bias that batch entries share: clusters of as many blocks sum dS, and no other kernel forms it again.
TEST(CudaPlan, BlocksSumTheGradientOfABias) {
  struct Expected {
    const char* line;
    int summed;
    int clusters;
    int chunks;
    std::int64_t kept;  // fp32 planes
  };
  for (const auto& [line, summed, clusters, chunks, kept] : {
           Expected{"b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k", 8, 256, 1, 0},
           Expected{"b=4 hq=16 hk=4 sq=2048 sk=2048 d=128 fp16 bias=1,h,q,k causal dropout=0.1", 4, 64, 1, 0},
           Expected{"b=32 hq=40 sq=512 sk=512 d=64 bf16 bias=1,h,q,k dropout=0.1 alibi=h", 8, 160, 1, 40},
           Expected{"b=2x3 hq=16 sq=512 sk=256 d=96 bf16 bias=1,h,q,k mask=b,1,1,k dropout=0.1", 2, 96, 3, 48},
           Expected{"b=1x384 hq=4 sq=384 sk=384 d=32 bf16 bias=b1,1,h,q,k dropout=0.1", 8, 72, 6, 24},
           Expected{"b=3x16 hq=16 sq=512 sk=512 d=96 bf16 bias=b1,1,h,q,k dropout=0.1", 8, 192, 1, 48},
           Expected{"b=16 hq=16 sq=1024 sk=1024 d=128 bf16 bias=1,h,q,k causal dropout=0.1", 8, 128, 1, 16},
       }) {
    const Plan plan = plan_of_line(fmt::format("bwd {} need=q,k,v,bias", line));
    const Launch* const main = find(plan, "sm90_summed_backward");
    ASSERT_NE(main, nullptr) << line << ": " << plan.summary;
    EXPECT_EQ(main->kernel.as<Sm90BackwardSpec>().summed, summed) << line;
    const Sm90KeyOrder order = sm90_key_order(Line(fmt::format("bwd {} need=q,k,v,bias", line)).call,
                                              main->kernel.as<Sm90BackwardSpec>(), target_of("sm_90"));
    const std::int64_t more = (order.parts - 1) * (clusters - order.whole);  // parts of the last clusters
    EXPECT_EQ(main->blocks, (clusters + more) * summed) << line;
    EXPECT_EQ(main->pieces, chunks) << line;
    EXPECT_EQ(find(plan, "sm90_bias_gradient"), nullptr) << line;
    EXPECT_EQ(find(plan, "bias_gradient_sum") != nullptr, kept > 0) << line;
    const Call call = Line(fmt::format("bwd {} need=q,k,v,bias", line)).call;
    const std::int64_t plane = call.problem.seqlen_q * call.problem.seqlen_k * std::int64_t{sizeof(float)};
    EXPECT_EQ(plan.workspace.size(Region::kBiasSum) / plane, kept) << line;
    EXPECT_LE(2 * plan.workspace.size(Region::kBiasSum), 3 * plan.workspace.size(Region::kDqSum)) << line;
  }
  for (const char* const line : {"b=3 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=8 hq=16 sq=2047 sk=2047 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=16 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias det",
                                 "b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias softcap=3",
                                 "b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k:fp32 need=q,k,v,bias",
                                 "b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias wide=bias",
                                 "b=8 hq=16 hk=4 sq=2048 sk=2048 d=64 bf16 bias=1,1,q,k need=q,k,v,bias",
                                 "b=8x8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,b2,h,q,k need=q,k,v,bias",
                                 "b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,bias",
                                 "b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2",
                                 "b=8 hq=16 sq=2048 sk=2048 d=192 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=8 hq=4 sq=512 sk=300 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=8 hq=16 sq=2048 sk=2046 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=384 hq=4 sq=384 sk=384 d=32 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=32 hq=12 sq=512 sk=512 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
                                 "b=16 hq=16 sq=1024 sk=1024 d=128 bf16 bias=1,h,q,k causal need=q,k,v,bias",
                                 "b=4 hq=16 sq=4096 sk=4096 d=128 bf16 bias=1,1,q,k need=q,k,v,bias"}) {
    EXPECT_EQ(find(plan_of_line(std::string("bwd ") + line), "sm90_summed_backward"), nullptr) << line;
  }
  for (const auto& [line, odd] : {std::pair{"b=8 hq=16 sq=2047 sk=2047 d=128 bf16 bias=1,h,q,k", true},
                                  std::pair{"b=8 hq=16 sq=2048 sk=2046 d=64 bf16 bias=1,h,q,k dropout=0.1", true},
                                  std::pair{"b=8 hq=16 sq=2047 sk=2048 d=128 bf16 bias=1,h,q,k", false},
                                  std::pair{"b=32 hq=40 sq=512 sk=512 d=64 bf16 bias=1,h,q,k dropout=0.1", false}}) {
    const Plan plan = plan_of_line(fmt::format("bwd {} need=q,k,v,bias", line));
    const Launch* const main = find(plan, "sm90_summed_backward");
    ASSERT_NE(main, nullptr) << line << ": " << plan.summary;
    EXPECT_EQ(main->kernel.as<Sm90BackwardSpec>().odd_sums, odd) << line;
  }
  // Rows of planes follow one another, so that four neighbouring sums may lie at any address.
  EXPECT_EQ(find(plan_of_line("bwd b=32 hq=40 sq=511 sk=511 d=64 bf16 bias=1,h,q,k dropout=0.1 need=q,k,v,bias"),
                 "sm90_summed_backward"),
            nullptr);
  // A batch may be empty.
  for (const char* const bias : {"b,h,q,k", "b,1,1,k", "1,h,q,k"}) {
    EXPECT_NO_THROW(plan_of_line(fmt::format("bwd b=0 hq=4 sq=70 sk=70 d=64 bf16 bias={} need=q,k,v,bias", bias)));
  }
}

// Otherwise blocks of keys would be computed twice, and others never.
TEST(CudaPlan, TheLastHeadsTurnBeginsWhereAnotherEnds) {
  std::int64_t with_both = 0;
  for (const char* const line : {"sq=300 sk=321 d=192 dv=128 fp16 causal", "sq=3000 sk=3000 d=256 bf16 causal",
                                 "sq=4096 sk=4096 d=64 bf16 causal", "sq=1000 sk=1000 d=128 bf16 causal",
                                 "sq=16384 sk=16384 d=256 bf16 causal", "sq=600 sk=600 d=80 bf16 causal"}) {
    for (int heads = 1; heads <= 40; ++heads) {
      for (const int group : {1, 2}) {
        const std::string text = fmt::format("bwd b=2 hq={} hk={} {} need=q,k,v", heads * group, heads, line);
        const Line made(text);
        const Target target = target_of("sm_90");
        const Plan plan = plan_for(made.call, target);
        for (const Launch& launch : plan.launches) {
          const auto* const spec = std::get_if<Sm90BackwardSpec>(&launch.kernel.spec);
          if (spec == nullptr || std::string_view(launch.kernel.name).find("backward") == std::string_view::npos) {
            continue;
          }
          const Sm90KeyOrder order = sm90_key_order(made.call, *spec, target);
          ASSERT_GE(order.heads_in_turn, 1) << text;
          ASSERT_GE(order.last_turn, 0) << text;
          ASSERT_LE(order.last_turn, 2 * heads) << text;
          EXPECT_TRUE(order.last_turn == 2 * heads || order.last_turn % order.heads_in_turn == 0) << text;
          with_both += order.heads_in_turn > 1 && order.last_turn > 0 && order.last_turn < 2 * heads;
        }
      }
    }
  }
  EXPECT_GT(with_both, 100);
}

// Where they fill the tensors. Others begin with the longest, and a window's blocks are all as long.
TEST(CudaPlan, PackedSequencesOfOneLengthHaveALastTurn) {
  struct Found {
    bool longest_first;
    std::int64_t heads_before;
  };
  const Target target = target_of("sm_90");
  const auto found = [&](const std::string& text) {
    const Line made("bwd " + text);
    const Plan plan = plan_for(made.call, target);
    const Launch* const main = find(plan, "sm90_backward");
    EXPECT_NE(main, nullptr) << text;
    const auto& spec = main->kernel.as<Sm90BackwardSpec>();
    const Sm90KeyOrder order = sm90_key_order(made.call, spec, target);
    EXPECT_EQ(order.heads_in_turn, 1) << text;  // of ragged sequences: Sm90KeyBlock::number_after()
    return Found{spec.longest_first, order.last_turn};
  };
  constexpr std::int64_t kHeads = 16 * 8;
  for (const auto& [line, heads] :
       {std::pair{"d=128", kHeads - 32}, std::pair{"d=64", kHeads - 32}, std::pair{"d=128 hk=8", kHeads / 2 - 32},
        std::pair{"d=96 dropout=0.1", kHeads - 32}, std::pair{"d=128 window=-1,100", kHeads - 32},
        std::pair{"d=128 used_k=5x8", kHeads - 32}, std::pair{"d=80", kHeads - 8}}) {
    const Found turns = found(fmt::format("hq=16 seqs_q=2048x8 bf16 causal {}", line));
    EXPECT_FALSE(turns.longest_first) << line;
    EXPECT_EQ(turns.heads_before, heads) << line;
  }
  for (const char* const line :
       {"seqs_q=2048x8 d=128", "seqs_q=2048x8 d=128 causal window=100,0", "seqs_q=2048x7,2047 d=128 causal",
        "seqs_q=2048x8 total_q=16385 d=128 causal", "seqs_q=2048x8 max_q=2049 d=128 causal",
        "seqs_q=2048x8 seqs_k=2048x7,1000 d=128 causal", "seqs_q=2048x8 used_q=2048x8 d=128 causal",
        "b=8 sq=2048 sk=2048 used_k=2048x8 d=128 causal", "seqs_q=16384x8 d=128 causal",
        "seqs_q=2048x8 d=128 causal det", "seqs_q=2048x8 d=192 dv=128 causal"}) {
    const Found longest = found(fmt::format("hq=16 bf16 {}", line));
    EXPECT_TRUE(longest.longest_first) << line;
    EXPECT_EQ(longest.heads_before, kHeads) << line;
  }
}

// Of a bias that many entries share, and whose planes of sums stay in L2.
TEST(CudaPlan, AddsTheGradientOfABiasInMemory) {
  const auto adds = [](const std::string& line) {
    const Plan plan = plan_of_line("bwd " + line);
    const Launch* const main = find(plan, "sm90_backward");
    const bool yes = main != nullptr && main->kernel.as<Sm90BackwardSpec>().adds_bias;
    EXPECT_EQ(find(plan, "added_bias_clear") != nullptr, yes) << line;
    EXPECT_EQ(find(plan, "added_bias_sum") != nullptr, yes) << line;
    EXPECT_EQ(plan.summary.find("last bits vary") != std::string::npos, yes) << line;
    if (yes) {
      EXPECT_EQ(find(plan, "sm90_bias_gradient"), nullptr) << line;
      if (!main->kernel.as<Sm90BackwardSpec>().direct) {
        EXPECT_LE(2 * plan.workspace.size(Region::kBiasSum), 3 * plan.workspace.size(Region::kDqSum)) << line;
      }
    }
    return yes;
  };
  const std::string all = " need=q,k,v,bias";
  for (const char* const line :
       {"b=4 hq=16 sq=4096 sk=4096 d=128 bf16 bias=1,1,q,k", "b=8 hq=16 sq=2048 sk=2047 d=64 bf16 bias=1,1,q,k",
        "b=8 hq=16 sq=2048 sk=2048 d=128 bf16 bias=1,1,q,k",
        "b=32 hq=12 sq=512 sk=512 d=64 bf16 bias=1,h,q,k dropout=0.1",
        "b=768 hq=4 sq=768 sk=768 d=32 bf16 bias=1,h,q,k", "b=2x16 hq=4 sq=500 sk=300 d=80 fp16 bias=b1,1,h,q,k:fp32",
        "b=4 hq=32 hk=8 sq=2048 sk=2048 d=128 bf16 bias=1,1,q,k causal softcap=9 alibi=h dropout=0.1"}) {
    EXPECT_TRUE(adds(line + all)) << line;
  }
  EXPECT_TRUE(adds("b=512 hq=8 sq=384 sk=384 d=32 bf16 bias=1,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2"));
  // Packed sequences with dropout, which many share.
  const auto packed = [](int count, const std::string& more) {
    return fmt::format("hq=16 bf16 seqs_q=1024x{0} seqs_k=1024x{0} need=q,k,v,bias {1}", count, more);
  };
  EXPECT_TRUE(adds(packed(8, "d=128 bias=1,h,q,k dropout=0.1")));
  EXPECT_FALSE(adds(packed(8, "d=128 bias=1,h,q,k")));
  EXPECT_FALSE(adds(packed(8, "d=64 bias=1,h,q,k dropout=0.1")));
  EXPECT_FALSE(adds(packed(3, "d=128 bias=1,h,q,k dropout=0.1")));
  EXPECT_FALSE(adds(packed(4, "d=128 bias=1,h,q,k dropout=0.1")));  // more than 1.5 times dq
  EXPECT_FALSE(adds(packed(8, "d=128 bias=b,h,q,k dropout=0.1")));
  EXPECT_FALSE(adds(packed(8, "d=128 bias=1,h,q,k dropout=0.1 det")));
  for (const char* const line : {"b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,1,q,k det",
                                 "b=3 hq=4 sq=512 sk=512 d=64 bf16 bias=1,1,q,k",         // few entries
                                 "b=64 hq=8 sq=70 sk=200 d=64 bf16 bias=1,1,q,k",         // few tiles
                                 "b=8 hq=16 sq=4096 sk=4096 d=64 bf16 bias=1,1,q,k",      // more than L2 holds
                                 "b=16 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k",     // more than L2 holds
                                 "b=16 hq=1 sq=64 sk=4096 d=64 bf16 bias=1,1,q,k",        // more than 1.5 times dq
                                 "b=4 hq=16 sq=2048 sk=2048 d=192 bf16 bias=1,1,q,k"}) {  // another kernel
    EXPECT_FALSE(adds(line + all)) << line;
  }
  EXPECT_FALSE(adds("b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,1,q,k need=k,v,bias"));
}

// The launch of sm90_backward, or of sm90_wide_backward.
const Launch* main_of(const Plan& plan) {
  const Launch* const narrow = find(plan, "sm90_backward");
  return narrow != nullptr ? narrow : find(plan, "sm90_wide_backward");
}

// A bias that nothing shares, whose rows begin anywhere, is read where it lies, and dS goes to such rows.
TEST(CudaPlan, OddRowsOfABiasThatNothingShares) {
  const auto main = [](const std::string& line) -> std::string {
    const Plan plan = plan_of_line("bwd " + line);
    const Launch* const launch = find(plan, "sm90_backward");
    const bool odd = launch != nullptr && launch->kernel.as<Sm90BackwardSpec>().odd_rows;
    EXPECT_EQ(find(plan, "prepare_pack") == nullptr, odd) << line;
    return !odd ? "packed" : launch->kernel.as<Sm90BackwardSpec>().dbias_store ? "stored" : "read";
  };
  const std::string shape = "b=2 hq=4 sq=300 sk=301 d=64 bf16 ";
  EXPECT_EQ(main(shape + "bias=b,h,q,k need=q,k,v,bias"), "stored");
  EXPECT_EQ(main(shape + "bias=b,h,q,k dropout=0.1 mask=b,1,1,k need=q,k,bias"), "stored");
  EXPECT_EQ(main(shape + "bias=b,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2"), "stored");
  EXPECT_EQ(main("b=2x2 hq=4 hk=2 sq=300 sk=306 d=128 fp16 bias=b1,b2,h,q,k need=q,k,v,bias"), "stored");
  EXPECT_EQ(main(shape + "bias=b,h,q,k causal need=q,k,v"), "read");
  for (const char* const rest : {
           "bias=b,h,q,k causal need=q,k,v,bias",         // dS of tiles outside of the band is never made
           "bias=b,h,q,k softcap=3 need=q,k,v,bias",      // nor is dS the gradient here
           "bias=b,h,q,k det need=q,k,v,bias",            // sums of dq in order
           "bias=b,h,q,k need=k,v,bias",                  // not all gradients
           "bias=b,h,q,k need=bias",                      // not all gradients
           "bias=b,h,q,k:fp32 need=q,k,v",                // other classes of rows
           "bias=1,h,q,k need=q,k,v,bias",                // shared
           "bias=b,1,q,k need=q,k,v",                     // shared
           "bias=b,h,q,k bias2=b,h,q,k need=q,k,v,bias",  // of two
           "bias=b,h,q,k need=q,k,v,bias wide=bias",      // of fp32
           "bias=b,h,q,k used_k=301,70 need=q,k,v",       // lengths differ
       }) {
    EXPECT_EQ(main(shape + rest), "packed") << rest;
  }
  // Columns of 112 would be serialised.
  const Plan plan = plan_of_line("bwd b=2 hq=4 sq=300 sk=301 d=112 bf16 bias=b,h,q,k need=q,k,v,bias");
  EXPECT_EQ(find(plan, "sm90_backward")->kernel.as<Sm90BackwardSpec>().d, 128);
  EXPECT_EQ(main("b=2 hq=4 sq=300 sk=301 d=192 bf16 bias=b,h,q,k need=q,k,v,bias"), "packed");
  EXPECT_EQ(main("b=2 hq=4 sq=300 sk=101 d=64 bf16 bias=b,h,q,k need=q,k,v,bias"), "packed");
}

TEST(CudaPlan, StridesThatOddRowsMayHave) {
  const auto packs = [](const auto& change) {
    Line line("bwd b=2 hq=4 sq=300 sk=301 d=64 bf16 bias=b,h,q,k need=q,k,v,bias");
    change(line.call);
    return find(plan_for(line.call, target_of("sm_90")), "prepare_pack") != nullptr;
  };
  EXPECT_FALSE(packs([](Call&) {}));
  EXPECT_FALSE(packs([](Call& call) { call.bias.strides = {8 * 1000 * 301, 0, 1000 * 301, 301, 1}; }));
  EXPECT_FALSE(packs([](Call& call) { call.bias.strides.head = 0; }));  // the gradient has all heads
  EXPECT_TRUE(packs([](Call& call) { call.bias.strides.head += 1; }));
  EXPECT_TRUE(packs([](Call& call) { call.bias.strides.row = -301; }));
  const auto pitch = [](std::int64_t row) {
    return [row](Call& call) { call.bias.strides = {4 * 300 * row, 0, 300 * row, row, 1}; };
  };
  EXPECT_FALSE(packs(pitch(kRowBytesLimit / 2 - 1)));
  EXPECT_TRUE(packs(pitch(kRowBytesLimit / 2)));
  // One of both is enough: an aligned bias is read as it is otherwise.
  EXPECT_FALSE(packs([](Call& call) {
    call.bias.strides = {4 * 300 * 304, 0, 300 * 304, 304, 1};
    call.bias.data = nullptr;
  }));
  // Without its gradient a bias that is expanded is shared.
  Line line("bwd b=2 hq=4 sq=300 sk=301 d=64 bf16 bias=b,h,q,k need=q,k,v");
  line.call.bias.strides.head = 0;
  EXPECT_NE(find(plan_for(line.call, target_of("sm_90")), "prepare_pack"), nullptr);
}

TEST(CudaPlan, FewBlocksOfKeysAreShared) {
  const std::int64_t multiprocessors = target_of("sm_90").multiprocessors;
  for (const char* const line :
       {"bwd b=4 hq=8 hk=1 sq=1254 sk=1254 d=40 fp16 causal", "bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=128 bf16",
        "bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=128 bf16 causal det", "bwd b=1 hq=4 hk=1 sq=1664 sk=1664 d=192 bf16",
        "bwd b=2 hq=8 hk=1 seqs_q=900,2000 seqs_k=900,2000 d=64 bf16 window=300,0 dropout=0.1"}) {
    const Plan plan = plan_of_line(line);
    const Launch* const main = main_of(plan);
    const Launch* const after = find(plan, "sm90_backward_parts");
    ASSERT_TRUE(main != nullptr && after != nullptr) << line;
    EXPECT_TRUE(main->kernel.as<Sm90BackwardSpec>().key_parts) << line;
    EXPECT_GT(main->pieces, 1) << line;
    EXPECT_EQ(main->pieces, after->pieces) << line;
    EXPECT_GT(main->blocks, multiprocessors / 2) << line;
    EXPECT_EQ(find(plan, "backward_convert"), nullptr) << line;
    EXPECT_NE(plan.summary.find(fmt::format("a block of keys in {} parts", main->pieces)), std::string::npos)
        << plan.summary;
    // Each part has sums of its own, of whole blocks of keys.
    const Call call = Line(line).call;
    const auto& spec = main->kernel.as<Sm90BackwardSpec>();
    EXPECT_EQ(plan.workspace.size(Region::kKeySums), main->pieces * call.rows.batch() * call.rows.heads_k *
                                                         sm90_key_order(call, spec, target_of("sm_90")).head_rows *
                                                         (spec.d + spec.dv) * 4);
    EXPECT_EQ(after->kernel.as<AroundSpec>().d, spec.d) << line;
    EXPECT_EQ(after->kernel.as<AroundSpec>().dv, spec.dv) << line;
  }
  const Plan empty = plan_of_line("bwd b=0 hq=8 hk=1 sq=2048 sk=2048 d=64 bf16 causal");
  EXPECT_EQ(empty.summary.find("parts"), std::string::npos) << empty.summary;
  // Enough blocks without, or little to share, or sums over queries, which are a block's own.
  for (const char* const line : {"bwd b=4 hq=32 sq=4096 sk=4096 d=64 bf16", "bwd b=1 hq=8 sq=128 sk=128 d=64 bf16",
                                 "bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=64 bf16 bias=1,h,1,k"}) {
    const Plan plan = plan_of_line(line);
    EXPECT_FALSE(main_of(plan)->kernel.as<Sm90BackwardSpec>().key_parts) << line;
    EXPECT_EQ(main_of(plan)->pieces, 1) << line;
    EXPECT_FALSE(plan.workspace.has(Region::kKeySums)) << line;
  }
  // dq needs no sums but its own; where one block of keys has all of them dq is final, and dk and dv are not.
  const Plan dq = plan_of_line("bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=64 bf16 need=q");
  EXPECT_GT(main_of(dq)->pieces, 1);
  EXPECT_FALSE(dq.workspace.has(Region::kKeySums));
  EXPECT_NE(find(dq, "backward_convert"), nullptr);
  const Plan direct = plan_of_line("bwd b=1 hq=8 sq=4096 sk=77 d=64 bf16");
  EXPECT_TRUE(main_of(direct)->kernel.as<Sm90BackwardSpec>().direct);
  EXPECT_GT(main_of(direct)->pieces, 1);
  EXPECT_FALSE(find(direct, "sm90_backward_parts")->kernel.as<AroundSpec>().dq);
}

// Where the last round of blocks would leave most multiprocessors idle its blocks of keys are divided.
TEST(CudaPlan, TheLastBlocksOfKeysAreShared) {
  const Target target = target_of("sm_90");
  struct Wanted {
    const char* line;
    const char* kernel;
    std::int64_t all, last;  // clusters of blocks, where the kernel has these
  };
  for (const Wanted& wanted :
       {Wanted{"bwd b=1 hq=10 sq=2048 sk=2048 d=128 bf16", "sm90_backward", 160, 28},
        Wanted{"bwd b=1 hq=10 sq=2048 sk=2048 d=64 bf16 need=v", "sm90_backward", 160, 28},
        Wanted{"bwd b=1 hq=40 hk=10 sq=1024 sk=2048 d=128 fp16", "sm90_backward", 160, 28},
        Wanted{"bwd b=1 hq=10 sq=1500 sk=2048 d=80 bf16 mask=b,1,q,k dropout=0.1", "sm90_backward", 160, 28},
        Wanted{"bwd b=2 hq=5 sq=2040 sk=2000 d=256 bf16", "sm90_wide_backward", 160, 28},
        Wanted{"bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias", "sm90_summed_backward", 256, 1},
        Wanted{"bwd b=8 hq=4 sq=1024 sk=640 d=128 bf16 bias=1,h,q,k need=q,k,v,bias", "sm90_summed_backward", 20, 5}}) {
    const Line made(wanted.line);
    const Plan plan = plan_for(made.call, target);
    const Launch* const main = find(plan, wanted.kernel);
    ASSERT_NE(main, nullptr) << wanted.line << plan.summary;
    const auto& spec = main->kernel.as<Sm90BackwardSpec>();
    EXPECT_TRUE(spec.key_parts && spec.last_parts) << wanted.line;
    const Sm90KeyOrder order = sm90_key_order(made.call, spec, target);
    EXPECT_EQ(order.items, wanted.all * spec.summed) << wanted.line;
    EXPECT_EQ(order.whole, wanted.all - wanted.last) << wanted.line;
    EXPECT_GT(order.parts, 1) << wanted.line;
    EXPECT_EQ(order.numbers, order.whole + wanted.last * order.parts) << wanted.line;
    EXPECT_EQ(find(plan, "sm90_backward_parts"), nullptr) << wanted.line;
    const std::int64_t keys = wanted.last * spec.summed * sm90_backward_sizes(spec).keys;
    EXPECT_EQ(plan.workspace.size(Region::kKeySums), order.parts * keys * (spec.d + spec.dv) * 4) << wanted.line;
    // A counter for each piece that a warp adds.
    EXPECT_LE(keys / 8,
              BehindTurns::kCounters * BehindTurns::turns(padded_rows(made.call.rows), made.call.rows.heads_q));
    EXPECT_TRUE(plan.workspace.has(Region::kTurns)) << wanted.line;
    EXPECT_NE(plan.summary.find(
                  fmt::format("the last {} blocks of keys in {} parts", wanted.last * spec.summed, order.parts)),
              std::string::npos)
        << plan.summary;
    // Every part of every block has a number, and no number stands for two.
    KeyParts parts;
    parts.whole = static_cast<int>(order.whole);
    parts.count = order.parts;
    constexpr Sm90BackwardSpec kShared{{}, {}, {.key_parts = true, .last_parts = true}};
    std::set<std::pair<u32, u32>> seen;
    for (std::int64_t number = 0; number < order.numbers; ++number) {
      const PartOfKeys part = part_of_keys<kShared>(parts, static_cast<u32>(number));
      EXPECT_LT(part.block, wanted.all);
      EXPECT_LT(part.part, static_cast<u32>(part.parts));
      EXPECT_EQ(part.parts, part.block < order.whole ? 1 : order.parts);
      seen.emplace(part.block, part.part);
    }
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(order.numbers));
  }
  // Full rounds; many of them; blocks that begin with the longest, in an order, or of several lengths; sums over
  // queries, which are a block's own; a gradient of q alone.
  for (const char* const line :
       {"bwd b=1 hq=33 sq=2048 sk=512 d=64 bf16", "bwd b=4 hq=16 sq=4096 sk=4096 d=128 bf16",
        "bwd b=1 hq=10 sq=2048 sk=2048 d=128 bf16 causal", "bwd b=1 hq=10 sq=2048 sk=2048 d=128 bf16 det",
        "bwd b=2 hq=5 seqs_q=2048,2048 seqs_k=2048,2048 d=128 bf16",
        "bwd b=1 hq=10 sq=2048 sk=2048 d=64 bf16 bias=1,h,1,k need=q,k,v,bias",
        "bwd b=1 hq=10 sq=2048 sk=2048 d=64 bf16 need=q", "bwd b=1 hq=10 sq=100 sk=2048 d=128 bf16"}) {
    const Plan plan = plan_of_line(line);
    EXPECT_FALSE(main_of(plan)->kernel.as<Sm90BackwardSpec>().last_parts) << line;
    EXPECT_FALSE(plan.workspace.has(Region::kKeySums)) << line;
  }
}

// A part of a GPU may have any number of multiprocessors. What the parts leave is bounded by it, whatever the problem.
TEST(CudaPlan, PartsOfKeysOnAnyGpu) {
  constexpr std::int64_t kMostBytesOfAPart = 128 * 320 * 4;
  for (const int multiprocessors : {1, 2, 3, 16, 66, 78, 114, 132, 1000}) {
    Target target = target_of("sm_90");
    target.multiprocessors = multiprocessors;
    for (const char* const line :
         {"bwd b=1 hq=64 hk=1 sq=100000 sk=300 d=64 bf16",
          "bwd b=1 hq=64 hk=1 sq=3000 sk=3000 d=192 dv=128 bf16 causal",
          "bwd b=1 hq=64 hk=1 sq=3000 sk=3000 d=32 bf16 window=500,0 det", "bwd b=1 hq=8 hk=2 sq=900 sk=70 d=16 bf16",
          "bwd b=3 hq=16 hk=2 seqs_q=900,1,2000 seqs_k=900,1,2000 d=256 bf16 causal",
          "bwd b=2 hq=8 sq=4096 sk=4096 d=128 bf16 bias=1,1,q,k", "bwd b=1 hq=8 sq=256 sk=256 d=256 bf16",
          "bwd b=1 hq=8 sq=2000 sk=2000 d=256 bf16", "bwd b=3 hq=7 sq=2000 sk=2000 d=64 bf16",
          "bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=128 bf16 need=k"}) {
      const Plan plan = plan_for(Line(line).call, target);
      const Launch* const main = main_of(plan);
      ASSERT_NE(main, nullptr) << line;
      const auto& spec = main->kernel.as<Sm90BackwardSpec>();
      EXPECT_EQ(main->pieces > 1, spec.key_parts) << line << ", " << multiprocessors;
      EXPECT_EQ(find(plan, "sm90_backward_parts") != nullptr, spec.key_parts && !spec.last_parts)
          << line << ", " << multiprocessors;
      EXPECT_LE(plan.workspace.size(Region::kKeySums), 3 * multiprocessors * kMostBytesOfAPart)
          << line << ", " << multiprocessors;
    }
  }
}

TEST(CudaPlan, ColumnsOfHeadsOver256AreSplitAmongTwoBlocks) {
  const std::string call = "bwd b=2 hq=4 hk=2 sq=300 sk=200 bf16 ";
  for (const char* const line : {"d=512", "d=264 dv=300", "d=512 causal mask=b,h,q,k alibi=h softcap=3 dropout=0.1",
                                 "d=512 bias=1,h,q,k used_k=200,70"}) {
    const Plan plan = plan_of_line(call + line);
    const Launch* const main = find(plan, "sm90_split_backward");
    const Launch* const after = find(plan, "backward_convert");
    ASSERT_TRUE(main != nullptr && after != nullptr) << line;
    constexpr std::int64_t kKeyBlocks = 4;  // of 64
    EXPECT_EQ(main->blocks, 2 * 2 * 2 * kKeyBlocks) << line;
    EXPECT_EQ(main->pieces, 1) << line;
    EXPECT_LE(main->kernel.shared_bytes, target_of("sm_90").shared_per_block) << line;
    constexpr std::int64_t kColumns = 512;  // whatever head_dim is
    EXPECT_EQ(after->kernel.as<AroundSpec>().d, kColumns) << line;
    EXPECT_EQ(plan.workspace.size(Region::kDqSum), 2 * 384 * 4 * kColumns * 4) << line;
  }
  // In order dq is another kernel's.
  const Plan ordered = plan_of_line(call + "d=512 det");
  EXPECT_FALSE(find(ordered, "sm90_split_backward")->kernel.as<Sm90BackwardSpec>().dq);
  EXPECT_NE(find(ordered, "generic_backward_dq"), nullptr);
  EXPECT_FALSE(ordered.workspace.has(Region::kDqSum));
  EXPECT_NE(plan_of_line("fwd b=2 hq=4 sq=128 sk=128 bf16 d=512").summary.find(" 96 keys a step"), std::string::npos);
  // A merged out of wide heads is not joined from parts; few tiles are put together by generic_combine.
  for (const auto& [line, joins, split] : {std::tuple{"b=1 hq=75 sq=128 sk=2000 lse wide=out", true, false},
                                           std::tuple{"b=1 hq=75 sq=128 sk=2000 lse wide=out add=out", false, false},
                                           std::tuple{"b=1 hq=30 sq=128 sk=4096 lse wide=out", true, false},
                                           std::tuple{"b=1 hq=30 sq=128 sk=4096 lse wide=out add=out", false, true}}) {
    const Plan plan = plan_of_line(fmt::format("fwd d=512 bf16 {}", line));
    const Launch* const wide = find(plan, "sm90_wide_forward");
    ASSERT_NE(wide, nullptr) << line;
    EXPECT_EQ(wide->kernel.as<Sm90ForwardSpec>().joins, joins) << line;
    EXPECT_EQ(wide->kernel.as<Sm90ForwardSpec>().split, split) << line;
    EXPECT_EQ(find(plan, "generic_combine") != nullptr, split) << line;
  }
  const std::pair<std::string, std::string> passed_over[] = {
      {"d=512 dv=520", "head_dim over 512"},
      {"d=512 dv=256", "one head_dim over 256 and the other not"},
      {"d=64 dv=512", "one head_dim over 256 and the other not"},
      {"d=512 bias=1,h,q,k:fp32", "with a bias of fp32"},
      {"d=512 bias=1,h,1,k need=q,k,v,bias", "the gradient of a bias without queries"},
      {"d=512 mask=b,h,q,1", "a bias or mask without keys"},
      {"d=512 dropout=0.1 rng=torch_mem_efficient", "torch_mem_efficient"},
      {"d=512 need=q", "neither dk nor dv"},
  };
  for (const auto& [line, why] : passed_over) {
    const Plan plan = plan_of_line(call + line);
    EXPECT_EQ(find(plan, "sm90_split_backward"), nullptr) << line;
    EXPECT_NE(plan.summary.find(why), std::string::npos) << plan.summary;
  }
}

TEST(CudaPlan, FewQueriesSplitTheKeys) {
  const Plan plan = plan_of_line("fwd b=1 hq=8 hk=1 sq=1 sk=32768 d=128 bf16 causal");
  const Launch* forward = find(plan, "generic_forward");
  const Launch* combine = find(plan, "generic_combine");
  ASSERT_TRUE(forward != nullptr && combine != nullptr);
  EXPECT_TRUE(forward->kernel.as<ForwardSpec>().split);
  EXPECT_FALSE(forward->kernel.as<ForwardSpec>().banded);  // the last row meets every key
  EXPECT_GT(forward->pieces, 8);
  EXPECT_EQ(combine->pieces, forward->pieces);
  EXPECT_EQ(find(plan_of_line("fwd b=8 hq=32 sq=4096 sk=4096 d=128 bf16"), "generic_combine"), nullptr);
}

TEST(CudaPlan, FewQueriesSplitTheKeysOnHopper) {
  for (const std::string line :
       {"b=2 hq=16 sq=64 sk=3412 d=192 bf16", "b=1 hq=4 sq=500 sk=2496 d=64 bf16 causal",
        "b=1 hq=8 sq=100 sk=4096 d=128 bf16 lse wide=out add=out", "b=2 hq=2 seqs_q=9,70 seqs_k=2100,3 d=64 bf16"}) {
    const Plan plan = plan_of_line("fwd " + line);
    const Launch* forward = find(plan, "sm90_forward");
    const Launch* combine = find(plan, "generic_combine");
    ASSERT_TRUE(forward != nullptr && combine != nullptr) << line;
    const auto& spec = forward->kernel.as<Sm90ForwardSpec>();
    EXPECT_TRUE(spec.split && !spec.joins && !spec.fp32_results) << line;
    EXPECT_GT(forward->pieces, 1) << line;
    EXPECT_EQ(combine->pieces, forward->pieces) << line;
    EXPECT_LE(forward->blocks, 132) << line;
    EXPECT_GE(plan.workspace.size(Region::kPartialOut), std::int64_t{4} * forward->pieces * spec.dv) << line;
    EXPECT_EQ(combine->kernel.as<AroundSpec>().fp32_results, line.find("wide") != std::string::npos) << line;
  }
  // Two or three parts, and parts of the last tiles alone, are put together by the part that ends last.
  struct Wanted {
    const char* line;
    std::int64_t tiles, last;
    int parts;  // 0: several
  };
  for (const Wanted& wanted :
       {Wanted{"b=1 hq=4 sq=2496 sk=2496 d=64 bf16 causal", 52, 52, 2},
        Wanted{"b=3 hq=4 seqs_q=900,70,1500 seqs_k=2100,3,1500 d=64 bf16 wide=out add=out lse", 0, 0, 0},
        Wanted{"b=4 hq=1 sq=2048 sk=3904 d=128 bf16 bias=b,h,q,k layout=strided skew=1", 64, 64, 2},
        Wanted{"b=1 hq=8 sq=3456 sk=3296 d=64 bf16 bias=1,h,q,k", 144, 12, 0},
        Wanted{"b=8 hq=1 sq=2304 sk=2624 d=128 bf16 dropout=0.1", 144, 12, 0},
        Wanted{"b=4 hq=6 sq=3456 sk=3328 d=96 bf16 sink", 432, 36, 0}}) {
    const Line made(fmt::format("fwd {}", wanted.line));
    const Plan plan = plan_for(made.call, target_of("sm_90"));
    const Launch* const forward = find(plan, "sm90_forward");
    ASSERT_NE(forward, nullptr) << wanted.line;
    const auto& spec = forward->kernel.as<Sm90ForwardSpec>();
    EXPECT_TRUE(spec.joins && !spec.split) << wanted.line << plan.summary;
    EXPECT_EQ(find(plan, "generic_combine"), nullptr) << wanted.line;
    EXPECT_NE(find(plan, "sm90_schedule"), nullptr) << wanted.line;  // clears the counters
    EXPECT_GT(forward->pieces, 1) << wanted.line;
    EXPECT_TRUE(wanted.parts == 0 || forward->pieces == wanted.parts) << wanted.line << plan.summary;
    if (wanted.tiles > 0) {
      EXPECT_EQ(forward->blocks,
                std::min<std::int64_t>(wanted.tiles - wanted.last + wanted.last * forward->pieces, 132))
          << wanted.line;
      EXPECT_EQ(plan.workspace.size(Region::kPartialOut), wanted.last * forward->pieces * spec.warps * 16 * spec.dv * 4)
          << wanted.line;
      EXPECT_GE(plan.workspace.size(Region::kSchedule), wanted.last * spec.warps * 4) << wanted.line;
    }
  }
  // Full rounds, few steps, many rounds, tiles of different length.
  for (const char* const line : {"b=1 hq=33 sq=512 sk=2048 d=128 bf16", "b=2 hq=10 sq=1024 sk=512 d=128 bf16",
                                 "b=4 hq=16 sq=4096 sk=4096 d=128 bf16", "b=2 hq=10 sq=1024 sk=2048 d=128 bf16 causal",
                                 "b=2 hq=10 sq=1024 sk=2048 d=128 bf16 used_k=2048,900"}) {
    const Plan plan = plan_of_line(fmt::format("fwd {}", line));
    EXPECT_FALSE(sm90_has_parts(find(plan, "sm90_forward")->kernel.as<Sm90ForwardSpec>())) << line;
    EXPECT_FALSE(plan.workspace.has(Region::kPartialOut)) << line;
  }
  EXPECT_EQ(find(plan_of_line("fwd b=1 hq=4 sq=64 sk=2047 d=64 bf16"), "generic_combine"), nullptr);
  EXPECT_EQ(find(plan_of_line("fwd b=4 hq=32 sq=64 sk=4096 d=64 bf16"), "generic_combine"), nullptr);
}

// Where one block has all keys and nothing else reads row vectors, the kernel makes them.
TEST(CudaPlan, ABackwardOfFewKeysIsOneLaunch) {
  for (const std::string line : {"b=16 hq=16 sq=4096 sk=77 d=64 bf16", "b=2 hq=8 sq=200 sk=128 d=128 fp16 causal dlse",
                                 "b=4 hq=40 sq=128 sk=128 d=40 bf16 dropout=0.1 softcap=3 alibi=h"}) {
    const Plan plan = plan_of_line("bwd " + line + " need=q,k,v");
    ASSERT_EQ(plan.launches.size(), 1) << line << ": " << plan.summary;
    EXPECT_TRUE(plan.launches[0].kernel.as<Sm90BackwardSpec>().makes_rows) << line;
    EXPECT_EQ(plan.workspace.bytes(), 0) << line;
  }
  const std::string dense = "bwd b=1 hq=16 bf16 sq=4096 sk=77 ";
  for (const std::string& line :
       {dense + "d=64 sink need=q,k,v,sink", dense + "d=64 bias=1,h,q,k need=q,k,v",
        dense + "d=64 bias=1,h,1,k need=q,k,v,bias", dense + "d=64 mask=b,1,q,1 need=q,k,v", dense + "d=60 need=q,k,v",
        dense + "d=64 need=k,v", dense + "d=64 wide=out need=q,k,v",
        std::string("bwd b=1 hq=16 bf16 seqs_q=4096 seqs_k=77 d=64 need=q,k,v")}) {
    EXPECT_NE(find(plan_of_line(line), "backward_prepare"), nullptr) << line;
  }
}

// ---- Hopper ----

std::string forward_of(const std::string& line, const std::string& architecture) {
  const Plan plan = plan_of_line("fwd " + line, architecture);
  for (const Launch& launch : plan.launches) {
    const std::string_view name = launch.kernel.name;
    if (name == "generic_forward" || name == "generic_wide_forward" || name == "sm90_forward" ||
        name == "sm90_wide_forward") {
      return launch.kernel.name;
    }
  }
  return "";
}

TEST(CudaPlan, HopperForwardTakesAllButThis) {
  const std::string all = "softcap=30 alibi=h sink bias=b,h,q,k:fp32 mask=1,1,q,k dropout=0.6 causal window=9,-1 ";
  for (const std::string line :
       {"b=2 hq=4 sq=128 sk=128 d=64 bf16", "b=2 hq=4 hk=1 sq=500 sk=77 d=100 dv=256 fp16",
        "b=1 hq=1 sq=1 sk=1 d=1 bf16", "b=2 hq=4 seqs_q=3,900 seqs_k=300,7 d=192 dv=128 bf16 sink",
        "b=1 hq=8 sq=128 sk=2047 d=128 bf16", "b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=1,h,q,k:fp32",
        "b=2 hq=4 sq=128 sk=128 d=32 bf16 bias=1,h,q,k:fp32",
        "b=2 hq=4 sq=128 sk=128 d=64 bf16 dropout=0.1 rng=torch_mem_efficient",
        "b=2 hq=4 sq=128 sk=128 d=256 fp16 bias=1,h,q,k:fp32 dropout=0.5"}) {
    EXPECT_EQ(forward_of(line, "sm_90"), "sm90_forward") << line;
    EXPECT_EQ(forward_of(line, "sm_100"), "generic_forward") << line;
  }
  for (const std::string d : {"192", "256"}) {
    EXPECT_EQ(forward_of(all + "b=2 hq=4 sq=128 sk=128 bf16 scale=-2 bias2=b,1,q,k:fp16 d=" + d, "sm_90"),
              "sm90_forward");
  }
  for (const std::string dims : {"d=512", "d=264", "d=512 dv=64", "d=64 dv=512", "d=256 dv=264"}) {
    for (const std::string& line : {std::string("causal bias=1,h,q,k dropout=0.1 "), all + "bias2=b,1,q,k:fp16 ",
                                    std::string("dropout=0.1 rng=torch_mem_efficient "),
                                    std::string("lse wide=out add=out "), std::string("window=20,0 ")}) {
      const std::string rows = line.starts_with("window") ? "b=2 hq=4 sq=2048 sk=2048 " : "b=2 hq=4 sq=128 sk=128 ";
      EXPECT_EQ(forward_of(rows + "bf16 " + line + dims, "sm_90"), "sm90_wide_forward") << line << dims;
    }
    // Both blocks of a pair for each tile, in one launch.
    const Plan pairs = plan_of_line("fwd b=2 hq=4 sq=128 sk=128 bf16 " + dims);
    ASSERT_EQ(pairs.launches.size(), 1u);
    EXPECT_EQ(pairs.launches[0].blocks, 2 * 8);
  }
  const std::pair<std::string, std::string> passed_over[] = {
      {"b=2 hq=4 sq=128 sk=128 d=64 fp32", "fp32"},
      {"b=2 hq=4 sq=128 sk=128 d=64 dv=513 bf16", "head_dim over 512"},
      {"b=2 hq=4 sq=128 sk=0 d=64 bf16", "nothing to attend to"},
      {"b=1 hq=8 sq=1 sk=2048 d=128 bf16", "split"},
  };
  for (const auto& [line, why] : passed_over) {
    EXPECT_EQ(forward_of(line, "sm_90").substr(0, 8), "generic_") << line;
    EXPECT_NE(plan_of_line("fwd " + line).summary.find(why), std::string::npos) << plan_of_line("fwd " + line).summary;
  }
}

TEST(CudaPlan, HopperForwardCountsTilesOnlyWhereThereAreMany) {
  EXPECT_EQ(find(plan_of_line("fwd b=1 hq=132 sq=128 sk=128 d=128 bf16"), "sm90_schedule"), nullptr);
  const Plan many = plan_of_line("fwd b=1 hq=133 sq=128 sk=128 d=256 bf16");
  ASSERT_NE(find(many, "sm90_schedule"), nullptr);
  EXPECT_EQ(find(many, "sm90_forward")->blocks, 132);
  EXPECT_LE(many.workspace.bytes(), 256);
  // Nor where blocks have equal shares of equal tiles.
  for (const auto& [line, counts] :
       {std::pair{"d=128", false}, std::pair{"d=128 bias=1,h,q,k", false}, std::pair{"d=128 causal", true},
        std::pair{"d=128 dropout=0.1", true}, std::pair{"d=128 mask=b,1,1,k", true}, std::pair{"d=192", true}}) {
    const Plan plan = plan_of_line(fmt::format("fwd b=1 hq=300 sq=128 sk=128 bf16 {}", line));
    EXPECT_EQ(find(plan, "sm90_schedule") != nullptr, counts) << line;
    EXPECT_EQ(find(plan, "sm90_forward")->blocks, 132) << line;
  }
  // Of packed sequences there are at most total / rows + B row tiles, each 24 bytes.
  const Plan packed = plan_of_line("fwd b=4 hq=2 seqs_q=1,1,1,997 seqs_k=1,1,1,997 d=128 bf16");
  EXPECT_GE(packed.workspace.size(Region::kSchedule), (1000 / 128 + 4) * 24);
  EXPECT_LE(packed.workspace.size(Region::kSchedule), (1000 / 128 + 4) * 24 + 16);
}

// ---- limits ----

TEST(CudaPlan, MaxSeqlenBeyondAllRowsCostsNothing) {
  for (const std::string direction : {"fwd", "bwd"}) {
    const std::string line = direction +
                             " b=2 hq=4 hk=2 seqs_q=3,9 seqs_k=300,700 total_q=12 total_k=1000 d=8 fp16 "
                             "bias=b,h,1,1 bias2=1,1,1,1 sink ";
    const Plan expected = plan_of_line(line + "max_q=12 max_k=1000");
    const Plan far = plan_of_line(line + "max_q=1099511627776 max_k=1099511627776");
    EXPECT_EQ(far.workspace.bytes(), expected.workspace.bytes());
    EXPECT_EQ(far.launches.size(), expected.launches.size());
  }
}

TEST(CudaPlan, SequencesThatIntCannotCountAreRefused) {
  const auto why_not = [](const std::string& line) -> std::string {
    try {
      plan_of_line(line);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), FOVEA_UNSUPPORTED);
      return error.what();
    }
  };
  EXPECT_EQ(why_not("fwd b=1 hq=1 sq=16 sk=536870912 d=8 bf16 causal"), "");
  EXPECT_EQ(why_not("fwd b=1 hq=1 sq=16 sk=536870913 d=8 bf16 causal"),
            "k: sequences of up to 536870913; accepted: at most 536870912 under a causal mask or a window");
  EXPECT_EQ(why_not("bwd b=1 hq=1 sq=16 sk=1073741824 d=8 bf16"), "");
  EXPECT_EQ(why_not("bwd b=1 hq=1 sq=1073741825 sk=16 d=8 bf16"),
            "q: sequences of up to 1073741825; accepted: at most 1073741824");
  const std::string packed =
      "bwd b=1 hq=1 seqs_q=3 seqs_k=4 total_q=3 total_k=4 d=8 bf16 bias=1,1,1,k need=bias max_q=3 ";
  EXPECT_EQ(why_not(packed + "max_k=1073741824"), "");
  EXPECT_EQ(why_not(packed + "max_k=1073741825"),
            "bias: a gradient with 1073741825 rows or columns; accepted: at most 1073741824");
}

TEST(CudaPlan, NothingToComputeIsNoLaunch) {
  EXPECT_TRUE(plan_of_line("fwd b=0 hq=4 sq=128 sk=128 d=64 bf16").launches.empty());
  EXPECT_TRUE(plan_of_line("fwd b=2 hq=4 sq=0 sk=128 d=64 bf16").launches.empty());
  EXPECT_NE(find(plan_of_line("bwd b=2 hq=4 sq=0 sk=128 d=64 bf16"), "generic_backward"), nullptr);  // zeros
}

TEST(CudaPlan, MoreHeadsThanAGridDimensionHas) {
  const Plan plan = plan_of_line("bwd b=70000 hq=2 sq=16 sk=16 d=32 bf16");
  for (const Launch& launch : plan.launches) {
    EXPECT_EQ(launch.blocks_y, 1u);
    EXPECT_GE(launch.blocks, 132) << launch.kernel.name;
  }
}

// ---- every row ----

TEST(CudaPlan, EveryRowOnEveryArchitecture) {
  for (const std::string architecture : {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"}) {
    const Target target = target_of(architecture);
    for (const Problem& problem : both_directions_of_the_table()) {
      const Shapes shapes(problem);
      const Call call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
      const Plan plan = plan_for(call, target);
      std::int64_t end = 0;
      for (int region = 0; region < kRegions; ++region) {
        if (plan.workspace.has(Region(region))) {
          EXPECT_EQ(plan.workspace.offset(Region(region)) % Workspace::kAlignment, 0);
          end = std::max(end, plan.workspace.offset(Region(region)) + plan.workspace.size(Region(region)));
        }
      }
      EXPECT_LE(end, plan.workspace.bytes());
      for (const Launch& launch : plan.launches) {
        EXPECT_GT(launch.blocks, 0);
        EXPECT_LE(launch.kernel.shared_bytes, target.shared_per_block) << print(launch.kernel.spec);
        EXPECT_LE(launch.kernel.threads, 1024);
        std::visit([&](const auto& spec) { EXPECT_EQ(spec.arch, target.capability) << launch.kernel.name; },
                   launch.kernel.spec);
        const auto* const hopper = std::get_if<Sm90BackwardSpec>(&launch.kernel.spec);
        EXPECT_TRUE(hopper == nullptr || !hopper->key_parts || launch.pieces > 1 ||
                    (hopper->summed > 1 && hopper->last_parts && plan.workspace.has(Region::kKeySums)))
            << launch.kernel.name;
      }
    }
  }
}

}  // namespace
}  // namespace fovea::cuda
