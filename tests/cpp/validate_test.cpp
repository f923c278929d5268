// SPDX-License-Identifier: Apache-2.0
//
// Every refusal of core/validate.cpp, through the C ABI: the status, the argument's name, what it was and what is
// accepted, and that nothing was written. And that what is legal, however odd, is accepted and understood.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>

#include "arguments.h"
#include "core/overlap.h"
#include "core/validate.h"
#include "dispatch/plan.h"

namespace fovea {
namespace {

using testing::Arguments;
using testing::run;
using Rows = Arguments::Rows;

std::string describe(const fovea_problem& problem, Direction direction) {
  char text[1024];
  const fovea_status status =
      fovea_describe(&problem, static_cast<fovea_direction>(direction), text, sizeof(text), nullptr);
  return status == FOVEA_OK ? text : fovea_last_error();
}

struct Refusal {
  const char* name;  // of the argument: the message begins with it
  std::vector<std::string> parts;
  std::function<void(Arguments&)> breakage;
  fovea_status status = FOVEA_INVALID_ARGUMENT;
};

constexpr fovea_status kType = FOVEA_INVALID_TYPE;

// Those that any rows and either direction refuse alike.
std::vector<Refusal> refusals_of_all() {
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  const double kInfinity = std::numeric_limits<double>::infinity();
  return {
      {"problem", {"size 8", "sizeof(fovea_problem)"}, [](auto& a) { a.problem.size = 8; }},
      {"problem", {"size 0", "sizeof(fovea_problem)"}, [](auto& a) { a.problem.size = 0; }},
      {"problem",
       {fmt::format("size {}", sizeof(fovea_problem) - 2), "a multiple of 8"},
       [](auto& a) { a.problem.size = sizeof(a.problem) - 2; }},
      {"problem", {"from 144 to 4096"}, [](auto& a) { a.problem.size = ~std::size_t{0} - 7; }},
      {"flags", {"0x80000001", "FOVEA_CAUSAL"}, [](auto& a) { a.problem.flags = 0x80000001u; }},
      {"align", {"2", "FOVEA_TOP_LEFT"}, [](auto& a) { a.problem.align = 2; }},
      {"rng", {"-1", "FOVEA_RNG_FOVEA"}, [](auto& a) { a.problem.rng = -1; }},
      {"device", {"7", "FOVEA_CPU"}, [](auto& a) { a.problem.device = 7; }},
      {"device_index", {"1", "0 on the CPU"}, [](auto& a) { a.problem.device_index = 1; }},
      {"reserved", {"3", "0"}, [](auto& a) { a.problem.reserved = 3; }},
      {"stream", {"0x10", "NULL"}, [](auto& a) { a.problem.stream = reinterpret_cast<void*>(0x10); }},
      {"backend", {"'fpga'", "cpu, cuda, reference"}, [](auto& a) { a.problem.backend = "fpga"; }},
      {"no backend can compute",
       {"never moved to a CUDA device"},
       [](auto& a) { a.problem.backend = "cuda"; },
       FOVEA_UNSUPPORTED},
      {"scale", {"nan", "finite"}, [=](auto& a) { a.problem.scale = kNan, a.problem.flags |= FOVEA_SCALE; }},
      {"scale", {"-inf", "finite"}, [=](auto& a) { a.problem.scale = -kInfinity, a.problem.flags |= FOVEA_SCALE; }},
      {"scale", {"1e+300", "fp32"}, [](auto& a) { a.problem.scale = 1e300, a.problem.flags |= FOVEA_SCALE; }},
      {"scale", {"0.5 without FOVEA_SCALE"}, [](auto& a) { a.problem.scale = 0.5; }},
      {"window_left", {"-2", "-1 (unbounded)"}, [](auto& a) { a.problem.window_left = -2, a.problem.flags |= 8; }},
      {"window_right", {"-9", "-1 (unbounded)"}, [](auto& a) { a.problem.window_right = -9, a.problem.flags |= 8; }},
      {"window_left", {"4 without FOVEA_WINDOW"}, [](auto& a) { a.problem.window_left = 4; }},
      {"window_right", {"5 without FOVEA_WINDOW"}, [](auto& a) { a.problem.window_right = 5; }},
      {"softcap", {"-1", "0 (none)"}, [](auto& a) { a.problem.softcap = -1; }},
      {"softcap", {"nan"}, [=](auto& a) { a.problem.softcap = kNan; }},
      {"softcap", {"inf"}, [=](auto& a) { a.problem.softcap = kInfinity; }},
      {"softcap", {"1e-40", "fp32"}, [](auto& a) { a.problem.softcap = 1e-40; }},
      {"dropout_p", {"-0.1", "0 <= dropout_p <= 1"}, [](auto& a) { a.problem.dropout_p = -0.1; }},
      {"dropout_p", {"1.5", "0 <= dropout_p <= 1"}, [](auto& a) { a.problem.dropout_p = 1.5; }},
      {"dropout_p", {"nan"}, [=](auto& a) { a.problem.dropout_p = kNan; }},

      {"q", {"not given"}, [](auto& a) { a.problem.q = nullptr; }},
      {"k", {"not given"}, [](auto& a) { a.problem.k = nullptr; }},
      {"v", {"not given"}, [](auto& a) { a.problem.v = nullptr; }},
      {"out", {"not given"}, [](auto& a) { a.problem.out = nullptr; }},
      {"q", {"int32", "fp32, fp16, bf16, fp64"}, [](auto& a) { a.type("q", FOVEA_INT32); }, kType},
      {"q", {"element type 99"}, [](auto& a) { a.type("q", 99); }, kType},
      {"q", {"element type 0"}, [](auto& a) { a.type("q", 0); }, kType},
      {"k", {"fp16", "fp32, the type of q"}, [](auto& a) { a.type("k", FOVEA_FP16); }, kType},
      {"v", {"bf16", "fp32, the type of q"}, [](auto& a) { a.type("v", FOVEA_BF16); }, kType},
      {"out", {"fp64", "fp32, the type of q"}, [](auto& a) { a.type("out", FOVEA_FP64); }, kType},
      {"lse", {"fp16", "fp32"}, [](auto& a) { a.type("lse", FOVEA_FP16); }, kType},
      {"bias", {"int64", "fp32, fp16, bf16"}, [](auto& a) { a.type("bias", FOVEA_INT64); }, kType},
      {"bias", {"fp64", "fp64 with fp64 q"}, [](auto& a) { a.type("bias", FOVEA_FP64); }, kType},
      {"bias", {"bool", "goes into mask"}, [](auto& a) { a.type("bias", FOVEA_BOOL); }, kType},
      {"bias2", {"int32", "fp32, fp16, bf16"}, [](auto& a) { a.type("bias2", FOVEA_INT32); }, kType},
      {"mask", {"fp32", "bool", "go into bias"}, [](auto& a) { a.type("mask", FOVEA_FP32); }, kType},
      {"mask", {"int64", "bool", "mask != 0"}, [](auto& a) { a.type("mask", FOVEA_INT64); }, kType},
      {"alibi_slopes", {"fp16", "fp32"}, [](auto& a) { a.type("alibi_slopes", FOVEA_FP16); }, kType},
      {"sink", {"bf16", "fp32"}, [](auto& a) { a.type("sink", FOVEA_BF16); }, kType},
      {"seqused_q", {"int64", "int32"}, [](auto& a) { a.type("seqused_q", FOVEA_INT64); }, kType},
      {"seqused_k", {"fp32", "int32"}, [](auto& a) { a.type("seqused_k", FOVEA_FP32); }, kType},

      {"bias",
       {"shape 2x4x3x4 does not broadcast to", "Hq=4"},
       [](auto& a) {
         a.reshape("bias", {2, 4, 3, 4});
       }},
      {"bias",
       {"shape 3x4x3x5 does not broadcast"},
       [](auto& a) {
         a.reshape("bias", {3, 4, 3, 5});
       }},
      {"bias2",
       {"shape 2x1x5 does not broadcast"},
       [](auto& a) {
         a.reshape("bias2", {2, 1, 5});
       }},
      {"mask",
       {"shape 2x5 does not broadcast"},
       [](auto& a) {
         a.reshape("mask", {2, 5});
       }},
      {"mask",
       {"shape 3x0 does not broadcast"},
       [](auto& a) {
         a.reshape("mask", {3, 0});
       }},
      {"alibi_slopes", {"shape 5", "(Hq)"}, [](auto& a) { a.reshape("alibi_slopes", {5}); }},
      {"alibi_slopes",
       {"shape 1x4", "(B1, B2, Hq), 2x4"},
       [](auto& a) {
         a.reshape("alibi_slopes", {1, 4});
       }},
      {"alibi_slopes", {"shape ()"}, [](auto& a) { a.reshape("alibi_slopes", {}); }},
      {"sink", {"shape 2", "(Hq), 4"}, [](auto& a) { a.reshape("sink", {2}); }},
      {"sink",
       {"shape 1x4", "(Hq), 4"},
       [](auto& a) {
         a.reshape("sink", {1, 4});
       }},
      {"seqused_q", {"shape 3", "(B), 2"}, [](auto& a) { a.reshape("seqused_q", {3}); }},
      {"seqused_k",
       {"shape 2x1", "(B), 2"},
       [](auto& a) {
         a.reshape("seqused_k", {2, 1});
       }},
      {"seqused_q", {"-1 at index 1", "0 to the length"}, [](auto& a) { a.template data<int>("seqused_q")[1] = -1; }},
      {"seqused_k", {"9 at index 0", "that sequence, 5"}, [](auto& a) { a.template data<int>("seqused_k")[0] = 9; }},

      {"q", {"data is NULL"}, [](auto& a) { a["q"].data = nullptr; }},
      {"bias", {"data is NULL", "2x4x3x5 has 120"}, [](auto& a) { a["bias"].data = nullptr; }},
      {"sink", {"data is NULL"}, [](auto& a) { a["sink"].data = nullptr; }},
      {"out", {"data is NULL"}, [](auto& a) { a["out"].data = nullptr; }},
      {"lse", {"data is NULL"}, [](auto& a) { a["lse"].data = nullptr; }},
      {"k", {"data at 0x", "a multiple of 4"}, [](auto& a) { a["k"].data = static_cast<char*>(a["k"].data) + 2; }},
      {"seqused_q",
       {"data at 0x", "a multiple of 4"},
       [](auto& a) { a["seqused_q"].data = static_cast<char*>(a["seqused_q"].data) + 1; }},
  };
}

// Those of one tensor as a struct, for every tensor that is given.
std::vector<Refusal> refusals_of_tensor(const char* name) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 61;
  const std::string tensor = name;
  return {
      {name, {"size 0", "sizeof(fovea_tensor)"}, [=](auto& a) { a[tensor].size = 0; }},
      {name, {"flags 0x2", "FOVEA_TENSOR_STRIDED"}, [=](auto& a) { a[tensor].flags = 2; }},
      {name, {"reserved is 1", "0"}, [=](auto& a) { a[tensor].reserved = 1; }},
      {name, {"rank 6", "0 to 5"}, [=](auto& a) { a[tensor].rank = 6; }},
      {name, {"rank -1", "0 to 5"}, [=](auto& a) { a[tensor].rank = -1; }},
      {name, {"shape -4", "0 or more"}, [=](auto& a) { a[tensor].shape[0] = -4; }},
      {name, {"shape 2305843009213693952", "2^50 elements"}, [=](auto& a) { a[tensor].shape[0] = kHuge; }},
      {name,
       {"strides", "2^50 bytes apart"},
       [=](auto& a) {
         a[tensor].flags = FOVEA_TENSOR_STRIDED;
         std::fill_n(a[tensor].stride, FOVEA_MAX_RANK, std::numeric_limits<std::int64_t>::min());
       }},
  };
}

std::vector<Refusal> refusals_of_dense() {
  return {
      {"q",
       {"shape 3x4x8", "(B, Sq, Hq, D)", "cu_seqlens_q"},
       [](auto& a) {
         a.reshape("q", {3, 4, 8});
       }},
      {"k",
       {"shape 5x2x8", "the rank of q, 4"},
       [](auto& a) {
         a.reshape("k", {5, 2, 8});
       }},
      {"v",
       {"shape 1x2x5x2x6", "the rank of q, 4"},
       [](auto& a) {
         a.reshape("v", {1, 2, 5, 2, 6});
       }},
      {"k",
       {"head_dim 7", "that of q, 8"},
       [](auto& a) {
         a.reshape("k", {2, 5, 2, 7});
       }},
      {"k",
       {"3 heads", "a divisor of q's 4 heads"},
       [](auto& a) {
         a.reshape("k", {2, 5, 3, 8});
       }},
      {"k",
       {"0 heads", "a divisor of q's 4 heads"},
       [](auto& a) {
         a.reshape("k", {2, 5, 0, 8});
       }},
      {"k",
       {"shape 1x5x2x8", "the batch of q, 2", "strides of 0"},
       [](auto& a) {
         a.reshape("k", {1, 5, 2, 8});
       }},
      {"q",
       {"shape 2x3x8589934592x8", "2^32 heads"},
       [](auto& a) {
         a.reshape("q", {2, 3, std::int64_t{1} << 33, 8});
       }},
      {"q",
       {"shape 2x3x4x8589934592", "head_dim at most 2^32"},
       [](auto& a) {
         a.reshape("q", {2, 3, 4, std::int64_t{1} << 33});
       }},
      {"v",
       {"shape 2x5x2x8589934592", "head_dim at most 2^32"},
       [](auto& a) {
         a.reshape("v", {2, 5, 2, std::int64_t{1} << 33});
       }},
      {"v",
       {"shape 2x6x2x6", "(B, Sk, Hk, Dv), 2x5x2x6"},
       [](auto& a) {
         a.reshape("v", {2, 6, 2, 6});
       }},
      {"v",
       {"shape 2x5x4x6", "2x5x2x6"},
       [](auto& a) {
         a.reshape("v", {2, 5, 4, 6});
       }},
      {"out",
       {"shape 2x3x4x8", "(B, Sq, Hq, Dv), 2x3x4x6"},
       [](auto& a) {
         a.reshape("out", {2, 3, 4, 8});
       }},
      {"lse",
       {"shape 2x3x4", "(B, Hq, Sq), 2x4x3"},
       [](auto& a) {
         a.reshape("lse", {2, 3, 4});
       }},
      {"bias",
       {"does not broadcast to B=2, Hq=4, Sq=3, Sk=5"},
       [](auto& a) {
         a.reshape("bias", {2, 4, 2, 5});
       }},
      {"bias",
       {"shape 1x2x4x3x5 does not broadcast"},
       [](auto& a) {
         a.reshape("bias", {1, 2, 4, 3, 5});
       }},
      {"max_seqlen_q", {"3 without cu_seqlens"}, [](auto& a) { a.problem.max_seqlen_q = 3; }},
      {"max_seqlen_k", {"-1 without cu_seqlens"}, [](auto& a) { a.problem.max_seqlen_k = -1; }},
      {"batch_outer", {"1 without cu_seqlens"}, [](auto& a) { a.problem.batch_outer = 1; }},
      {"q",
       {"sequences of up to 4294967297", "at most 2^32"},
       [](auto& a) {
         a.problem.dropout_p = 0.5;
         a.problem.bias = a.problem.bias2 = a.problem.mask = nullptr;
         a.reshape("q", {2, (std::int64_t{1} << 32) + 1, 4, 8});
         a.stride("q", {0, 0, 0, 0});
       }},
  };
}

std::vector<Refusal> refusals_of_two_levels() {
  return {
      {"k",
       {"shape 2x5x2x8", "the rank of q, 5"},
       [](auto& a) {
         a.reshape("k", {2, 5, 2, 8});
       }},
      {"k",
       {"shape 2x1x5x2x8", "the batch of q, 1x2"},
       [](auto& a) {
         a.reshape("k", {2, 1, 5, 2, 8});
       }},
      {"lse",
       {"shape 2x4x3", "(B1, B2, Hq, Sq), 1x2x4x3"},
       [](auto& a) {
         a.reshape("lse", {2, 4, 3});
       }},
      {"bias",
       {"does not broadcast to B1=1, B2=2, Hq=4, Sq=3, Sk=5"},
       [](auto& a) {
         a.reshape("bias", {2, 2, 4, 3, 5});
       }},
      {"alibi_slopes",
       {"shape 2x2x4", "1x2x4"},
       [](auto& a) {
         a.reshape("alibi_slopes", {2, 2, 4});
       }},
  };
}

std::vector<Refusal> refusals_of_packed() {
  return {
      {"q",
       {"shape 2x3x4x8", "(total_q, Hq, D)"},
       [](auto& a) {
         a.reshape("q", {2, 3, 4, 8});
       }},
      {"k",
       {"shape 2x5x2x8", "the rank of q, 3"},
       [](auto& a) {
         a.reshape("k", {2, 5, 2, 8});
       }},
      {"v",
       {"shape 7x2x6", "(total_k, Hk, Dv), 8x2x6"},
       [](auto& a) {
         a.reshape("v", {7, 2, 6});
       }},
      {"out",
       {"shape 4x4x6", "(total_q, Hq, Dv), 5x4x6"},
       [](auto& a) {
         a.reshape("out", {4, 4, 6});
       }},
      {"lse",
       {"shape 5x4", "(Hq, total_q), 4x5"},
       [](auto& a) {
         a.reshape("lse", {5, 4});
       }},
      {"bias",
       {"does not broadcast to B=2, Hq=4, max_seqlen_q=3, max_seqlen_k=5"},
       [](auto& a) {
         a.reshape("bias", {2, 4, 5, 8});
       }},
      {"cu_seqlens_k",
       {"not given beside cu_seqlens_q", "both, or neither"},
       [](auto& a) { a.problem.cu_seqlens_k = nullptr; }},
      {"cu_seqlens_q",
       {"not given beside cu_seqlens_k", "both, or neither"},
       [](auto& a) { a.problem.cu_seqlens_q = nullptr; }},
      {"cu_seqlens_q", {"fp32", "int32, int64"}, [](auto& a) { a.type("cu_seqlens_q", FOVEA_FP32); }, kType},
      {"cu_seqlens_k", {"bool", "int32, int64"}, [](auto& a) { a.type("cu_seqlens_k", FOVEA_BOOL); }, kType},
      {"cu_seqlens_q", {"shape 0", "(B + 1)"}, [](auto& a) { a.reshape("cu_seqlens_q", {0}); }},
      {"cu_seqlens_q",
       {"shape 3x1", "(B + 1)"},
       [](auto& a) {
         a.reshape("cu_seqlens_q", {3, 1});
       }},
      {"cu_seqlens_k", {"shape 2", "that of cu_seqlens_q, 3"}, [](auto& a) { a.reshape("cu_seqlens_k", {2}); }},
      {"cu_seqlens_q", {"data is NULL"}, [](auto& a) { a["cu_seqlens_q"].data = nullptr; }},
      {"cu_seqlens_q",
       {"begins with 1", "0 first"},
       [](auto& a) { a.template data<std::int32_t>("cu_seqlens_q")[0] = 1; }},
      {"cu_seqlens_q",
       {"4 at index 2 after 5", "never decrease"},
       [](auto& a) { a.template data<std::int32_t>("cu_seqlens_q")[1] = 5; }},
      {"cu_seqlens_k",
       {"-1 at index 1 after 0", "never decrease"},
       [](auto& a) { a.template data<std::int64_t>("cu_seqlens_k")[1] = -1; }},
      {"cu_seqlens_k",
       {"9 at index 2", "total_k, 8"},
       [](auto& a) { a.template data<std::int64_t>("cu_seqlens_k")[2] = 9; }},
      {"max_seqlen_q",
       {"2", "at least the longest sequence of cu_seqlens_q, 3"},
       [](auto& a) {
         a.problem.max_seqlen_q = 2;
         a.problem.seqused_q = nullptr;
       }},
      {"max_seqlen_q",
       {"1", "at least the longest sequence of seqused_q, 2"},
       [](auto& a) { a.problem.max_seqlen_q = 1; }},
      {"max_seqlen_k", {"-5", "at least"}, [](auto& a) { a.problem.max_seqlen_k = -5; }},
      {"max_seqlen_k",
       {"140737488355329", "at most 2^50 rows in 2 sequences of 4 heads"},
       [](auto& a) { a.problem.max_seqlen_k = (std::int64_t{1} << 47) + 1; }},
      {"max_seqlen_q",
       {"70368744177664", "2^50 elements in one"},
       [](auto& a) { a.problem.max_seqlen_q = std::int64_t{1} << 46; }},
      {"batch_outer", {"3", "a divisor of the batch, 2"}, [](auto& a) { a.problem.batch_outer = 3; }},
      {"batch_outer", {"-1", "a divisor of the batch, 2"}, [](auto& a) { a.problem.batch_outer = -1; }},
      {"seqused_q",
       {"2 at index 0", "that sequence, 1"},
       [](auto& a) { a.template data<std::int32_t>("seqused_q")[0] = 2; }},
  };
}

std::vector<Refusal> refusals_of_backward() {
  return {
      {"lse", {"not given", "the forward's logsumexp"}, [](auto& a) { a.problem.lse = nullptr; }},
      {"grad_out", {"not given"}, [](auto& a) { a.problem.grad_out = nullptr; }},
      {"grad_out", {"fp16", "the type of q"}, [](auto& a) { a.type("grad_out", FOVEA_FP16); }, kType},
      {"grad_lse", {"fp64", "fp32"}, [](auto& a) { a.type("grad_lse", FOVEA_FP64); }, kType},
      {"grad_q", {"bf16", "the type of q"}, [](auto& a) { a.type("grad_q", FOVEA_BF16); }, kType},
      {"grad_k", {"bf16", "the type of q"}, [](auto& a) { a.type("grad_k", FOVEA_BF16); }, kType},
      {"grad_v", {"bf16", "the type of q"}, [](auto& a) { a.type("grad_v", FOVEA_BF16); }, kType},
      {"grad_bias", {"fp16", "fp32, the type of the bias"}, [](auto& a) { a.type("grad_bias", FOVEA_FP16); }, kType},
      {"grad_bias2", {"bf16", "fp32, the type of the bias"}, [](auto& a) { a.type("grad_bias2", FOVEA_BF16); }, kType},
      {"grad_sink", {"fp16", "fp32"}, [](auto& a) { a.type("grad_sink", FOVEA_FP16); }, kType},
      {"grad_out", {"shape 1", "accepted"}, [](auto& a) { a.reshape("grad_out", {1}); }},
      {"grad_lse", {"shape 4", "accepted"}, [](auto& a) { a.reshape("grad_lse", {4}); }},
      {"grad_q", {"shape 1", "accepted"}, [](auto& a) { a.reshape("grad_q", {1}); }},
      {"grad_k", {"shape 1", "the shape of k"}, [](auto& a) { a.reshape("grad_k", {1}); }},
      {"grad_v", {"shape 1", "the shape of v"}, [](auto& a) { a.reshape("grad_v", {1}); }},
      {"grad_bias",
       {"shape 1x4x3x5", "the shape of the bias as given, 2x4x3x5"},
       [](auto& a) {
         a.reshape("grad_bias", {1, 4, 3, 5});
       }},
      {"grad_bias2",
       {"shape 1x4x1x5", "as given, 4x1x5"},
       [](auto& a) {
         a.reshape("grad_bias2", {1, 4, 1, 5});
       }},
      {"grad_sink", {"shape 1", "(Hq), 4"}, [](auto& a) { a.reshape("grad_sink", {1}); }},
      {"grad_bias", {"given without bias"}, [](auto& a) { a.problem.bias = nullptr; }},
      {"grad_bias2", {"given without bias2"}, [](auto& a) { a.problem.bias2 = nullptr; }},
      {"grad_sink", {"given without sink"}, [](auto& a) { a.problem.sink = nullptr; }},
      {"grad_q",
       {"strides", "two elements to one address"},
       [](auto& a) { a.stride("grad_q", std::vector<std::int64_t>(5, 0)); }},
      {"grad_bias",
       {"strides 0x15x5x1", "two elements to one address"},
       [](auto& a) {
         a.stride("grad_bias", {0, 15, 5, 1});
       }},
      {"grad_sink", {"strides 0", "two elements to one address"}, [](auto& a) { a.stride("grad_sink", {0}); }},
      {"grad_q", {"shares memory with q"}, [](auto& a) { a["grad_q"].data = a["q"].data; }},
      {"grad_k", {"shares memory with v"}, [](auto& a) { a["grad_k"].data = a["v"].data; }},
      {"grad_k",
       {"shares memory with grad_v"},
       [](auto& a) { a["grad_v"].data = static_cast<float*>(a["grad_k"].data) + 7; },
       FOVEA_INVALID_ARGUMENT},
      {"grad_bias", {"shares memory with grad_out"}, [](auto& a) { a["grad_bias"].data = a["grad_out"].data; }},
      {"grad_sink", {"shares memory with sink"}, [](auto& a) { a["grad_sink"].data = a["sink"].data; }},
      {"grad_bias2", {"shares memory with lse"}, [](auto& a) { a["grad_bias2"].data = a["lse"].data; }},
  };
}

std::vector<Refusal> refusals_of_forward() {
  return {
      {"out",
       {"strides", "two elements to one address"},
       [](auto& a) { a.stride("out", std::vector<std::int64_t>(5, 1)); }},
      {"lse",
       {"strides", "two elements to one address"},
       [](auto& a) { a.stride("lse", std::vector<std::int64_t>(5, 0)); }},
      {"out", {"shares memory with q"}, [](auto& a) { a["out"].data = a["q"].data; }},
      {"out", {"shares memory with lse"}, [](auto& a) { a["lse"].data = a["out"].data; }},
      {"lse", {"shares memory with sink"}, [](auto& a) { a["lse"].data = a["sink"].data; }},
      {"out", {"shares memory with bias"}, [](auto& a) { a["out"].data = static_cast<float*>(a["bias"].data) + 119; }},
  };
}

constexpr const char* kInputs[] = {"q",    "k",         "v",         "bias", "bias2", "mask", "alibi_slopes",
                                   "sink", "seqused_q", "seqused_k", "out",  "lse"};
constexpr const char* kBackward[] = {"grad_out", "grad_lse",  "grad_q",     "grad_k",
                                     "grad_v",   "grad_bias", "grad_bias2", "grad_sink"};

std::vector<Refusal> refusals(Rows rows, Direction direction) {
  std::vector<Refusal> all = refusals_of_all();
  const auto append = [&](const std::vector<Refusal>& more) { all.insert(all.end(), more.begin(), more.end()); };
  for (const char* name : kInputs) {
    append(refusals_of_tensor(name));
  }
  switch (rows) {
    case Rows::kDense:
      append(refusals_of_dense());
      break;
    case Rows::kTwoLevel:
      append(refusals_of_two_levels());
      break;
    case Rows::kPacked:
      append(refusals_of_packed());
      append(refusals_of_tensor("cu_seqlens_q"));
      append(refusals_of_tensor("cu_seqlens_k"));
  }
  if (direction == Direction::kBackward) {
    append(refusals_of_backward());
    for (const char* name : kBackward) {
      append(refusals_of_tensor(name));
    }
  } else {
    append(refusals_of_forward());
  }
  return all;
}

class Refusals : public ::testing::TestWithParam<std::tuple<Rows, Direction>> {};

TEST_P(Refusals, NameTheArgumentAndWriteNothing) {
  const auto [rows, direction] = GetParam();
  for (const Refusal& refusal : refusals(rows, direction)) {
    Arguments a(rows, direction);
    refusal.breakage(a);
    const fovea_status status = run(a);
    const std::string message = fovea_last_error();
    EXPECT_EQ(status, refusal.status) << refusal.name << " -> " << message;
    EXPECT_EQ(message.rfind(refusal.name, 0), 0u) << refusal.name << " -> " << message;
    for (const std::string& part : refusal.parts) {
      EXPECT_NE(message.find(part), message.npos) << "'" << part << "' in: " << message;
    }
    EXPECT_TRUE(a.untouched()) << refusal.name << " -> " << message;
  }
}

TEST_P(Refusals, WhatIsRightRuns) {
  const auto [rows, direction] = GetParam();
  for (const DType type : {DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64}) {
    Arguments a(rows, direction, type);
    EXPECT_EQ(run(a), FOVEA_OK) << fovea_last_error();
    EXPECT_STREQ(fovea_last_error(), "");
    EXPECT_FALSE(a.untouched());
  }
}

TEST_P(Refusals, NothingIsReadWhereOnlyShapesAreAsked) {
  const auto [rows, direction] = GetParam();
  Arguments a(rows, direction);
  const std::string with_memory = describe(a.problem, direction);
  for (const char* name : kInputs) {
    a[name].data = nullptr;
  }
  if (direction == Direction::kBackward) {
    for (const char* name : kBackward) {
      a[name].data = nullptr;
    }
  }
  std::size_t bytes = 1;
  EXPECT_EQ(fovea_workspace(&a.problem, static_cast<fovea_direction>(direction), &bytes), FOVEA_OK)
      << fovea_last_error();
  EXPECT_EQ(bytes, 0u);
  std::string expected = with_memory;
  for (const char* values : {"=1,2", "=4,2"}) {  // what the seqused hold is not known now
    expected.erase(expected.find(values), 4);
  }
  EXPECT_EQ(describe(a.problem, direction), expected);
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<Rows, Direction>>& info) {
  constexpr const char* kRows[] = {"Dense", "TwoLevel", "Packed"};
  return std::string(kRows[static_cast<int>(std::get<0>(info.param))]) +
         (std::get<1>(info.param) == Direction::kForward ? "Forward" : "Backward");
}

INSTANTIATE_TEST_SUITE_P(Validate, Refusals,
                         ::testing::Combine(::testing::Values(Rows::kDense, Rows::kTwoLevel, Rows::kPacked),
                                            ::testing::Values(Direction::kForward, Direction::kBackward)),
                         name_of_case);

// ---- what is legal, and how it is understood ----

TEST(Validate, TheProblemInWords) {
  Arguments dense(Rows::kDense, Direction::kBackward);
  EXPECT_EQ(describe(dense.problem, Direction::kBackward),
            "bwd b=2 hq=4 hk=2 sq=3 sk=5 d=8 dv=6 fp32 used_q=1,2 used_k=4,2 alibi=h sink bias=b,h,q,k bias2=1,h,1,k "
            "mask=1,1,q,k dlse backend=reference");
  Arguments two_level(Rows::kTwoLevel, Direction::kForward);
  two_level.problem.flags = FOVEA_CAUSAL | FOVEA_DETERMINISTIC;
  two_level.problem.align = FOVEA_TOP_LEFT;
  EXPECT_EQ(describe(two_level.problem, Direction::kForward),
            "fwd b=1x2 hq=4 hk=2 sq=3 sk=5 d=8 dv=6 fp32 used_q=1,2 used_k=4,2 causal align=tl alibi=h sink "
            "bias=1,b2,h,q,k bias2=1,1,h,1,k mask=1,1,1,q,k det lse backend=reference");
  Arguments packed(Rows::kPacked, Direction::kForward);
  packed.problem.max_seqlen_q = 0;
  packed.problem.batch_outer = 2;
  packed.reshape("bias", {2, 1, 1, 3, 5});
  EXPECT_EQ(describe(packed.problem, Direction::kForward),
            "fwd b=2x1 hq=4 hk=2 d=8 dv=6 fp32 seqs_q=1,3 total_q=5 seqs_k=5,2 total_k=8 used_q=1,2 used_k=4,2 "
            "alibi=h sink bias=b1,1,1,q,k bias2=1,1,h,1,k mask=1,1,1,q,k lse backend=reference");
}

TEST(Validate, AForwardMayHoldTheBackwardsTensorsToo) {
  Arguments a(Rows::kDense, Direction::kBackward);
  a["grad_q"].size = 0;  // not this direction's matter
  EXPECT_EQ(fovea_forward(&a.problem, nullptr, 0), FOVEA_OK) << fovea_last_error();
}

// What a program passes that was compiled with a header whose problem ended sooner.
TEST(Validate, AShorterProblemOfAnOlderHeader) {
  struct Cut {
    std::size_t size;
    std::vector<const fovea_tensor * fovea_problem::*> lacking;
  };
  using P = fovea_problem;
  for (const Cut& cut :
       {Cut{offsetof(P, grad_sink), {&P::grad_sink}}, Cut{offsetof(P, grad_bias2), {&P::grad_sink, &P::grad_bias2}},
        Cut{offsetof(P, grad_v), {&P::grad_sink, &P::grad_bias2, &P::grad_bias, &P::grad_v}}}) {
    Arguments expected(Rows::kDense, Direction::kBackward);
    Arguments older(Rows::kDense, Direction::kBackward);
    for (const auto& member : cut.lacking) {
      expected.problem.*member = nullptr;
      older.problem.*member = reinterpret_cast<const fovea_tensor*>(0x10);  // whatever lies behind the shorter struct
    }
    older.problem.size = cut.size;
    EXPECT_EQ(describe(older.problem, Direction::kBackward), describe(expected.problem, Direction::kBackward));
    ASSERT_EQ(run(expected), FOVEA_OK) << fovea_last_error();
    ASSERT_EQ(run(older), FOVEA_OK) << fovea_last_error();
    EXPECT_TRUE(older.same_outputs_as(expected));
  }
  // A forward of a header that knew of no backward; and one that ends before what a forward needs.
  Arguments forward(Rows::kDense, Direction::kForward);
  forward.problem.size = offsetof(P, grad_out);
  EXPECT_EQ(run(forward), FOVEA_OK) << fovea_last_error();
  forward.problem.size = offsetof(P, out);
  EXPECT_EQ(run(forward), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("out: not given", 0), 0u) << fovea_last_error();
}

// What a program passes that was compiled with a header whose structs have a field more.
TEST(Validate, LongerStructsOfANewerHeader) {
  struct NewerProblem {
    fovea_problem problem;
    std::int64_t field = 0;
  };
  struct NewerTensor {
    fovea_tensor tensor;
    std::int64_t field = 0;
  };
  Arguments expected(Rows::kDense, Direction::kForward);
  ASSERT_EQ(run(expected), FOVEA_OK) << fovea_last_error();
  Arguments a(Rows::kDense, Direction::kForward);
  NewerTensor k{a["k"]};
  k.tensor.size = sizeof(k);
  NewerProblem newer{a.problem};
  newer.problem.size = sizeof(newer);
  newer.problem.k = &k.tensor;
  const auto refused = [&](const std::string& begin) {
    EXPECT_EQ(fovea_forward(&newer.problem, nullptr, 0), FOVEA_UNSUPPORTED);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(begin, 0), 0u) << fovea_last_error();
    EXPECT_TRUE(a.untouched());
  };
  newer.field = 1;
  refused(fmt::format("problem: size {} with 1 in byte {}, a field of a newer version", sizeof(newer),
                      sizeof(newer.problem)));
  newer.field = 0;
  k.field = std::int64_t{5} << 56;
  refused("k: size 120 with 5 in byte 119, a field of a newer version");
  k.field = 0;
  ASSERT_EQ(fovea_forward(&newer.problem, nullptr, 0), FOVEA_OK) << fovea_last_error();
  EXPECT_TRUE(a.same_outputs_as(expected));
}

TEST(Validate, ABackwardOfNoGradientIsRefused) {
  Arguments a(Rows::kDense, Direction::kBackward);
  fovea_problem& p = a.problem;
  p.grad_q = p.grad_k = p.grad_v = p.grad_bias = p.grad_bias2 = p.grad_sink = nullptr;
  EXPECT_EQ(run(a), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("gradients: none given; accepted: at least one of grad_q", 0), 0u);
}

// Another thread may change them while a call runs: what was checked is what is computed with.
TEST(Validate, LengthsAreReadOnce) {
  for (const char* const backend : {"cpu", "reference"}) {
    for (const Rows rows : {Rows::kDense, Rows::kPacked}) {
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        Arguments expected(rows, direction);
        Arguments changed(rows, direction);
        expected.problem.backend = changed.problem.backend = backend;
        const Call call = validate(changed.problem, direction, false);
        std::fill_n(changed.data<std::int32_t>("seqused_q"), 2, 1 << 20);
        std::fill_n(changed.data<std::int32_t>("seqused_k"), 2, -7);
        if (rows == Rows::kPacked) {
          std::fill_n(changed.data<std::int32_t>("cu_seqlens_q"), 3, -(1 << 30));
          std::fill_n(changed.data<std::int64_t>("cu_seqlens_k"), 3, std::int64_t{1} << 60);
        }
        std::vector<char> workspace(plan(call).workspace);
        execute(call, workspace.data(), workspace.size());
        execute(validate(expected.problem, direction, false), workspace.data(), workspace.size());
        EXPECT_TRUE(changed.same_outputs_as(expected)) << backend;
      }
    }
  }
}

TEST(Validate, BroadcastingIsNumPys) {
  const std::pair<std::vector<std::int64_t>, const char*> kShapes[] = {
      {{}, "bias=1,1,1,1"},           {{1}, "bias=1,1,1,1"},          {{5}, "bias=1,1,1,k"},
      {{3, 1}, "bias=1,1,q,1"},       {{4, 1, 1}, "bias=1,h,1,1"},    {{2, 1, 1, 1}, "bias=b,1,1,1"},
      {{1, 1, 3, 5}, "bias=1,1,q,k"}, {{2, 4, 3, 5}, "bias=b,h,q,k"},
  };
  for (const auto& [shape, text] : kShapes) {
    Arguments a(Rows::kDense, Direction::kBackward);
    a.reshape("bias", shape);
    a.reshape("grad_bias", shape);
    EXPECT_NE(describe(a.problem, Direction::kBackward).find(text), std::string::npos) << text;
    EXPECT_EQ(run(a), FOVEA_OK) << fovea_last_error();
  }
}

TEST(Validate, StridesOfInputsAreFree) {
  Arguments a(Rows::kDense, Direction::kForward);
  a.stride("q", {0, 0, 0, 0});
  a.stride("k", {80, 16, 8, -1});
  a["k"].data = a.data<float>("k") + 7;
  a.stride("bias", {0, 0, 5, 1});
  EXPECT_EQ(run(a), FOVEA_OK) << fovea_last_error();
}

// As NumPy leaves it open what they are; nothing may be computed from them.
TEST(Validate, StridesOfDimensionsOfOneAreAnything) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
  Arguments expected(Rows::kTwoLevel, Direction::kForward);
  Arguments a(Rows::kTwoLevel, Direction::kForward);
  for (const auto& [name, row, head] : {std::tuple("q", 32, 8), std::tuple("out", 24, 6)}) {
    a.stride(name, {name[0] == 'q' ? kLowest : kLargest, 3 * row, row, head, 1});
  }
  for (const char* backend : {"reference", "cpu"}) {
    for (Arguments* call : {&expected, &a}) {
      std::size_t bytes = 0;
      call->problem.backend = backend;
      ASSERT_EQ(fovea_workspace(&call->problem, FOVEA_FORWARD, &bytes), FOVEA_OK) << fovea_last_error();
      std::vector<char> workspace(bytes);
      ASSERT_EQ(fovea_forward(&call->problem, workspace.data(), bytes), FOVEA_OK) << fovea_last_error();
    }
    EXPECT_TRUE(a.same_outputs_as(expected));
  }
}

TEST(Validate, GradientsMayBeViewsOfOneTensor) {
  Arguments a(Rows::kDense, Direction::kBackward);
  for (const char* name : {"q", "k", "v", "grad_q", "grad_k", "grad_v"}) {
    a.reshape(name, {2, 3, 2, 6});
    a.stride(name, {3 * 36, 36, 6, 1});
  }
  for (const char* name : {"out", "grad_out"}) {
    a.reshape(name, {2, 3, 2, 6});
  }
  for (const char* name : {"lse", "grad_lse"}) {
    a.reshape(name, {2, 2, 3});
  }
  a.problem.bias = a.problem.bias2 = a.problem.mask = a.problem.alibi_slopes = a.problem.sink = nullptr;
  a.problem.grad_bias = a.problem.grad_bias2 = a.problem.grad_sink = nullptr;
  a.problem.seqused_q = a.problem.seqused_k = nullptr;
  a["k"].data = a.data<float>("q") + 12;
  a["v"].data = a.data<float>("q") + 24;
  a["grad_k"].data = a.data<float>("grad_q") + 12;
  a["grad_v"].data = a.data<float>("grad_q") + 24;
  EXPECT_EQ(run(a), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(describe(a.problem, Direction::kBackward),
            "bwd b=2 hq=2 sq=3 sk=3 d=6 fp32 layout=qkv3 dlse backend=reference");
  a["grad_v"].data = a.data<float>("grad_q") + 23;
  EXPECT_EQ(run(a), FOVEA_INVALID_ARGUMENT);
}

TEST(Validate, LayoutsByName) {
  Arguments a(Rows::kDense, Direction::kForward);
  a.stride("q", {3 * 4 * 8, 8, 3 * 8, 1});
  a.stride("k", {5 * 2 * 8, 8, 5 * 8, 1});
  a.stride("v", {5 * 2 * 6, 6, 5 * 6, 1});
  EXPECT_NE(describe(a.problem, Direction::kForward).find(" layout=bhsd "), std::string::npos);
  a.stride("v", {5 * 2 * 6, 7, 5 * 6, 1});
  EXPECT_NE(describe(a.problem, Direction::kForward).find(" layout=strided "), std::string::npos);
}

TEST(Validate, NothingAtAllIsLegal) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    Arguments a(Rows::kDense, direction);
    for (const char* name : {"q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"}) {
      if (direction == Direction::kForward && std::string(name).rfind("grad_", 0) == 0) {
        continue;
      }
      a.reshape(name, {0, 0, 0, 0});
      a[name].data = nullptr;
    }
    a.reshape("lse", {0, 0, 0});
    a["lse"].data = nullptr;
    fovea_problem& p = a.problem;
    p.bias = p.bias2 = p.mask = p.alibi_slopes = p.sink = p.seqused_q = p.seqused_k = p.grad_bias = p.grad_bias2 =
        p.grad_sink = p.grad_lse = nullptr;
    EXPECT_EQ(run(a), FOVEA_OK) << fovea_last_error();
  }
}

TEST(Validate, SeedsBehindPointersAreAdded) {
  Arguments a(Rows::kDense, Direction::kForward);
  const std::uint64_t seed = ~std::uint64_t{0};
  const std::uint64_t offset = 40;
  a.problem.seed = 8;
  a.problem.offset = 2;
  a.problem.seed_ptr = &seed;
  a.problem.offset_ptr = &offset;
  const Call call = validate(a.problem, Direction::kForward, false);
  EXPECT_EQ(call.dropout.seed, 7u);
  EXPECT_EQ(call.dropout.offset, 42u);
  const Call shapes = validate(a.problem, Direction::kForward, true);
  EXPECT_EQ(shapes.dropout.seed, 8u);
  EXPECT_EQ(shapes.dropout.offset, 2u);
}

TEST(Validate, LengthsThatCannotBeReadNeedTheirMaximum) {
  Arguments a(Rows::kPacked, Direction::kForward);
  a["cu_seqlens_q"].data = nullptr;
  a["cu_seqlens_k"].data = nullptr;
  a.problem.seqused_q = a.problem.seqused_k = nullptr;
  EXPECT_EQ(describe(a.problem, Direction::kForward).rfind("max_seqlen_q: 0", 0), 0u);
  a["q"].shape[0] = a["out"].shape[0] = a["lse"].shape[1] = 0;  // without rows the longest sequence has none
  EXPECT_EQ(describe(a.problem, Direction::kForward).rfind("max_seqlen_k: 0", 0), 0u);
  a["q"].shape[0] = a["out"].shape[0] = a["lse"].shape[1] = 5;
  a.problem.max_seqlen_q = 3;
  a.problem.max_seqlen_k = 5;
  EXPECT_EQ(describe(a.problem, Direction::kForward),
            "fwd b=2 hq=4 hk=2 d=8 dv=6 fp32 total_q=5 max_q=3 total_k=8 max_k=5 alibi=h sink bias=b,h,q,k "
            "bias2=1,h,1,k mask=1,1,q,k lse backend=reference");
}

TEST(Validate, StridesOfViews) {
  Arguments a(Rows::kTwoLevel, Direction::kBackward);
  a.reshape("alibi_slopes", {2, 4});
  const Call call = validate(a.problem, Direction::kBackward, false);
  const auto expect = [](const View& view, std::array<std::int64_t, 5> strides) {
    EXPECT_EQ((std::array<std::int64_t, 5>{view.strides.batch1, view.strides.batch2, view.strides.head,
                                           view.strides.row, view.strides.col}),
              strides);
  };
  expect(call.q, {192, 96, 8, 32, 1});
  expect(call.v, {120, 60, 6, 12, 1});
  expect(call.lse, {24, 12, 3, 1, 0});
  expect(call.bias, {0, 60, 15, 5, 1});
  expect(call.bias2, {0, 0, 5, 0, 1});
  expect(call.grad_bias2, {0, 0, 5, 0, 1});
  expect(call.mask, {0, 0, 0, 5, 1});
  expect(call.alibi_slopes, {8, 4, 1, 0, 0});
  expect(call.sink, {0, 0, 1, 0, 0});
  Arguments packed(Rows::kPacked, Direction::kForward);
  const Call packed_call = validate(packed.problem, Direction::kForward, false);
  expect(packed_call.q, {0, 0, 8, 32, 1});
  expect(packed_call.lse, {0, 0, 5, 1, 0});
  expect(packed_call.bias, {60, 0, 15, 5, 1});
  EXPECT_EQ(packed_call.rows.limit_q, 3);
  EXPECT_EQ(packed_call.rows.rows_q, 5);
}

// ---- overlap ----

Footprint random_footprint(std::mt19937& engine) {
  Footprint f;
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); };
  f.rank = draw(0, 4);
  f.width = 1 << draw(0, 3);
  f.base = draw(0, 40) * f.width;
  for (int i = 0; i < f.rank; ++i) {
    f.extent[i] = draw(1, 4);
    f.stride[i] = draw(-12, 12) * f.width;
  }
  return f;
}

std::vector<std::int64_t> addresses_of(const Footprint& f) {
  std::vector<std::int64_t> addresses{f.base};
  for (int i = 0; i < f.rank; ++i) {
    std::vector<std::int64_t> next;
    for (const std::int64_t address : addresses) {
      for (std::int64_t index = 0; index < f.extent[i]; ++index) {
        next.push_back(address + index * f.stride[i]);
      }
    }
    addresses = next;
  }
  return addresses;
}

TEST(Overlap, AsByEnumeration) {
  std::mt19937 engine(3);
  int yes = 0;
  int yes_itself = 0;
  constexpr int kTimes = 20'000;
  for (int i = 0; i < kTimes; ++i) {
    const Footprint a = random_footprint(engine);
    const Footprint b = random_footprint(engine);
    std::vector<std::int64_t> in_a = addresses_of(a);
    const std::vector<std::int64_t> in_b = addresses_of(b);
    bool expected = false;
    for (const std::int64_t x : in_a) {
      for (const std::int64_t y : in_b) {
        expected = expected || (x < y + b.width && y < x + a.width);
      }
    }
    ASSERT_EQ(overlap(a, b), expected);
    std::sort(in_a.begin(), in_a.end());
    const bool expected_itself = std::adjacent_find(in_a.begin(), in_a.end()) != in_a.end();
    ASSERT_EQ(overlaps_itself(a), expected_itself);
    yes += expected ? 1 : 0;
    yes_itself += expected_itself ? 1 : 0;
  }
  EXPECT_GT(yes, kTimes / 10);
  EXPECT_LT(yes, kTimes * 9 / 10);
  EXPECT_GT(yes_itself, kTimes / 10);
  EXPECT_LT(yes_itself, kTimes * 9 / 10);
}

TEST(Overlap, OfLargeInterleavedTensorsIsFoundAtOnce) {
  // dq and dk of (B, S, 3, H, D), and of (B, S, H, 3, D).
  constexpr std::int64_t kB = 1 << 10;
  constexpr std::int64_t kS = 1 << 20;
  constexpr std::int64_t kH = 128;
  constexpr std::int64_t kD = 128;
  for (const std::int64_t head : {kD, 3 * kD}) {
    Footprint a{0, 1, 4, {kB, kS, kH, kD}, {kS * 3 * kH * kD, 3 * kH * kD, head, 1}};
    Footprint b = a;
    b.base = head == kD ? kH * kD : kD;
    EXPECT_FALSE(overlap(a, b));
    b.base -= 1;
    EXPECT_TRUE(overlap(a, b));
  }
}

}  // namespace
}  // namespace fovea
