// SPDX-License-Identifier: Apache-2.0
//
// include/fovea/attention.h, compiled as C++17: what it passes on, what it throws. What is computed is tested
// elsewhere; here the reference computes it.
#include <fovea/attention.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

static_assert(__cplusplus < 202002L, "this file is to be compiled as C++17");

namespace {

using Dims = fovea::Tensor::Dims;

// Two queries, two keys, one head of dimension 1; v = 1, 3.
struct Small {
  std::vector<float> q{0, 0}, k{0, 0}, v{1, 3}, out{9, 9}, lse{9, 9};
  Dims rows{1, 2, 1, 1};
  Dims statistics{1, 1, 2};
  fovea::Options options;

  Small() { options.backend = "reference"; }

  fovea::Forward forward() {
    return {fovea::tensor(q, rows),   fovea::tensor(k, rows),         fovea::tensor(v, rows),
            fovea::tensor(out, rows), fovea::tensor(lse, statistics), options};
  }
  void run() {
    fovea::Workspace workspace;
    fovea::run(forward(), workspace);
  }
};

TEST(AttentionHeader, ForwardAndBackward) {
  Small s;
  s.options.causal = true;
  s.run();
  EXPECT_EQ(s.out, (std::vector<float>{1, 2}));
  EXPECT_FLOAT_EQ(s.lse[1], std::log(2.0f));

  const std::vector<float> grad_out{1, 1};
  std::vector<float> grad_q(2, 9), grad_v(2, 9), bias{0}, grad_bias{9};
  s.options.bias = fovea::tensor(bias, {1});
  fovea::Gradients grads;
  grads.q = fovea::tensor(grad_q, s.rows);
  grads.v = fovea::tensor(grad_v, s.rows);
  grads.bias = fovea::tensor(grad_bias, {1});
  fovea::backward(fovea::tensor(grad_out, s.rows), fovea::tensor(s.q, s.rows), fovea::tensor(s.k, s.rows),
                  fovea::tensor(s.v, s.rows), fovea::tensor(s.out, s.rows), fovea::tensor(s.lse, s.statistics), grads,
                  s.options);
  EXPECT_FLOAT_EQ(grad_v[0], 1.5f);
  EXPECT_FLOAT_EQ(grad_v[1], 0.5f);
  EXPECT_EQ(grad_q, (std::vector<float>{0, 0}));
  EXPECT_EQ(grad_bias[0], 0);
}

TEST(AttentionHeader, OptionsArriveWhereTheyBelong) {
  Small s;
  std::vector<float> bias(4), bias2(1), slopes(1), sink(1);
  std::vector<std::uint8_t> mask(4, 1);
  std::vector<std::int32_t> used{2};
  s.options.window = {3, 4};
  s.options.align = fovea::Align::kTopLeft;
  s.options.scale = 0.25;
  s.options.softcap = 5;
  s.options.bias = fovea::tensor(bias, {2, 2});
  s.options.bias2 = fovea::tensor(bias2, {1});
  s.options.mask = fovea::tensor(mask, {1, 1, 2, 2});
  s.options.alibi_slopes = fovea::tensor(slopes, {1});
  s.options.sink = fovea::tensor(sink, {1});
  s.options.dropout_p = 0.5;
  s.options.seed = 7;
  s.options.offset = 8;
  s.options.rng = fovea::Rng::kTorchMemEfficient;
  s.options.seqused_q = fovea::tensor(used, {1});
  s.options.seqused_k = fovea::tensor(used, {1});
  s.options.deterministic = true;
  EXPECT_EQ(fovea::describe(s.forward()),
            "fwd b=1 hq=1 sq=2 sk=2 d=1 fp32 used_q=2 used_k=2 align=tl window=3,4 scale=0.25 softcap=5 alibi=h sink "
            "bias=1,1,q,k bias2=1,1,1,1 mask=1,1,q,k dropout=0.5 rng=torch_mem_efficient seed=7 offset=8 det lse "
            "backend=reference");
}

TEST(AttentionHeader, PackedRowsAndGradients) {
  const std::vector<fovea::bf16> rows(6 * 2 * 4);
  std::vector<fovea::bf16> written(rows);
  std::vector<float> lse(2 * 6);
  const std::array<std::int64_t, 4> cu{0, 1, 3, 6};
  const Dims shape{6, 2, 4};
  fovea::Backward call;
  call.grad_out = call.q = call.k = call.v = call.out = fovea::tensor(rows, shape);
  call.lse = call.grad_lse = fovea::tensor(lse, {2, 6});
  call.grads.k = fovea::tensor(written, shape);
  call.options.cu_seqlens_q = call.options.cu_seqlens_k = fovea::tensor(cu, {4});
  call.options.max_seqlen_q = 4;
  call.options.batch_outer = 3;
  EXPECT_EQ(fovea::describe(call), "bwd b=3x1 hq=2 d=4 bf16 seqs_q=1,2,3 max_q=4 seqs_k=1,2,3 need=k dlse");
  call.options.backend = "reference";
  EXPECT_EQ(fovea::workspace(call), 0u);
}

// What the call throws, which is to be a fovea::Error.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const fovea::Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind(std::string(fovea_status_name(error.status())) + ": ", 0), 0u);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(AttentionHeader, ABackwardWithoutGradientsIsRefused) {
  Small s;
  s.run();
  const std::vector<float> grad_out{1, 1};
  EXPECT_EQ(error_of([&] {
              fovea::backward(fovea::tensor(grad_out, s.rows), fovea::tensor(s.q, s.rows), fovea::tensor(s.k, s.rows),
                              fovea::tensor(s.v, s.rows), fovea::tensor(s.out, s.rows),
                              fovea::tensor(s.lse, s.statistics), {}, s.options);
            }),
            "invalid argument: gradients: none given; accepted: at least one of grad_q, grad_k, grad_v, grad_bias, "
            "grad_bias2, grad_sink");
}

TEST(AttentionHeader, BytesAreNotLengths) {
  Small s;
  const std::vector<std::uint8_t> cu{0, 2};
  s.rows = {2, 1, 1};
  s.statistics = {1, 2};
  s.options.cu_seqlens_q = s.options.cu_seqlens_k = fovea::tensor(cu, {2});
  EXPECT_EQ(error_of([&] { s.run(); }).rfind("invalid type: cu_seqlens_q: bool (uint8_t); accepted: int32, int64", 0),
            0u);
}

TEST(AttentionHeader, AWorkspaceThatIsTooSmallIsNamed) {
  Small s;
  s.options.backend = "cpu";
  const std::size_t bytes = fovea::workspace(s.forward());
  ASSERT_GT(bytes, 1u);
  std::vector<unsigned char> memory(bytes);
  fovea::Workspace small(memory.data(), bytes - 1);
  EXPECT_EQ(error_of([&] { fovea::run(s.forward(), small); }),
            "out of memory: workspace: " + std::to_string(bytes - 1) + " bytes; accepted: at least " +
                std::to_string(bytes) + ", as fovea::workspace(call) says");
  EXPECT_EQ(s.out, (std::vector<float>{9, 9}));
  fovea::Workspace enough(memory.data(), bytes);
  fovea::run(s.forward(), enough);
  EXPECT_EQ(s.out, (std::vector<float>{2, 2}));
}

TEST(AttentionHeader, ErrorsAreOfOneType) {
  Small s;
  s.rows = {1, 1, 2, 1};
  try {
    s.run();
    FAIL();
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.status(), FOVEA_INVALID_ARGUMENT);
    EXPECT_STREQ(error.what(), "invalid argument: lse: shape 1x1x2; accepted: (B, Hq, Sq), 1x2x1");
  }
  EXPECT_EQ(error_of([&] { fovea::tensor(s.q, {3}); }),
            "invalid argument: tensor: a container of 2 elements; accepted: 3, as the shape has");
  EXPECT_EQ(error_of([&] { fovea::Tensor(s.q.data(), Dims(6, 1)); }),
            "invalid argument: tensor: rank 6 with no strides; accepted: rank 0 to 5, a stride for each dimension or "
            "none");
  EXPECT_EQ(error_of([&] { fovea::Tensor(s.q.data(), {2}, {1, 1}); }).rfind("invalid argument: tensor: rank 1", 0), 0u);
  for (const int threads : {-1, 4097}) {
    EXPECT_EQ(error_of([&] { fovea::set_num_threads(threads); }),
              "invalid argument: n: " + std::to_string(threads) + "; accepted: 0 (all that may be used) to 4096");
  }
  s.options.backend = "";
  s.options.device = fovea::Device::kCuda;
  s.rows = {1, 2, 1, 1};
  EXPECT_THROW(s.run(), fovea::Error);
  EXPECT_NE(fovea::explain(s.forward()).find("cuda: "), std::string::npos);
}

TEST(AttentionHeader, WorkspacesGrowOrAreTheCallers) {
  fovea::Workspace workspace;
  workspace.require(10);
  EXPECT_EQ(workspace.bytes(), 10u);
  workspace.require(5);
  EXPECT_EQ(workspace.bytes(), 10u);
  // More than there is: an Error like any other, and an empty workspace that can grow again.
  EXPECT_THROW(workspace.require(std::size_t{1} << 62), fovea::Error);
  EXPECT_EQ(workspace.bytes(), 0u);
  EXPECT_EQ(workspace.data(), nullptr);
  workspace.require(10);
  EXPECT_EQ(workspace.bytes(), 10u);
  void* const data = workspace.data();
  fovea::Workspace moved = std::move(workspace);
  EXPECT_EQ(moved.data(), data);
  std::array<unsigned char, 8> memory{};
  fovea::Workspace fixed(memory.data(), memory.size());
  fixed.require(100);
  EXPECT_EQ(fixed.data(), memory.data());
  EXPECT_EQ(fixed.bytes(), 8u);
}

TEST(AttentionHeader, OnTheCpuThereIsNothingToPrepare) {
  Small s;
  s.options.backend = "cpu";
  fovea::prepare(s.forward());
  s.rows = {1, 1, 2, 1};
  EXPECT_THROW(fovea::prepare(s.forward()), fovea::Error);
}

TEST(AttentionHeader, TheRest) {
  EXPECT_NE(fovea::explain("bwd sq=4 d=4 backend=reference").find("reference: used"), std::string::npos);
  EXPECT_NE(fovea::explain("bwd sq=4 d=8 bf16", "sm_80").find("cuda: used: for sm_80: "), std::string::npos);
  EXPECT_NE(fovea::backends().find("reference\tavailable\n"), std::string::npos);
  EXPECT_GE(fovea::num_threads(), 1);
  const std::vector<std::uint8_t> kept = fovea::dropout_mask(1, 2, 3, 4, 0, 1);
  EXPECT_EQ(kept, std::vector<std::uint8_t>(24, 1));
  EXPECT_EQ(fovea::dropout_mask(1, 2, 3, 4, 1, 1), std::vector<std::uint8_t>(24, 0));
  EXPECT_THROW(fovea::dropout_mask(1, -2, 3, 4, 0.5, 1), fovea::Error);
}

}  // namespace
