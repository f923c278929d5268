// SPDX-License-Identifier: Apache-2.0
//
// What a GPU kernel's machine code may take.
#pragma once

#include <string_view>

#include "cuda/config/kernel.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/kernels/sm90_backward_order.h"

namespace fovea::cuda::limits {

// D=192/128 and 160, with blocks in parts: once a block, before its first step and where its parts are joined,
// registers go to local memory. The loop over steps has two accesses.
inline bool has_wide_parts(const Sm90BackwardSpec& spec, std::string_view name) {
  return name == "sm90_backward" && sm90_is_wide(spec) && spec.last_parts;
}

// Bytes, stores and loads together: a few registers' worth, in kernels that have many features at once. More have
//   sm90_backward with Spec::same_step and a band or a bias, with tile_stores, or of 80 queries a step, or with
//   Spec::converts and three warpgroups: its warps that copy or convert have 24 or 32 registers, and those that compute
//   spill nothing; with
//   Spec::converts and results in fp32, where those that compute spill behind the loop, as lanes exchange what they
//   store; three kinds of kernel that the benchmark's rows, not the case table, take. Theirs are known and not yet
//   mended.
inline int spilt(const Kernel& kernel) {
  constexpr int kUsual = 128;
  constexpr int kByCopies = 256;
  constexpr int kByCopiesOfV = 320;          // the same, where the others have 240 to hold V
  constexpr int kByCopiesOf80 = 448;         // or for 80 queries a step
  constexpr int kByCopiesOf80InParts = 544;  // the same, with blocks of keys in parts
  constexpr int kTwoBiases = 384;            // MSA rows: a bias and a term of keys
  constexpr int kTwoBiasesAdded = 832;       // the same, whose dS is added up in memory: 1.13 of the speed all the same
  constexpr int kHalvesWithDropout = 272;    // D=192/128 and 160
  constexpr int kParts192 = 832;             // the same without dropout: has_wide_parts() says where
  constexpr int kParts160 = 400;
  constexpr int kExchanged = 384;  // results in fp32, behind the loop: lanes exchange what they store
  constexpr int kSummed = 288;     // the gradient of an fp32 bias, or with dropout at D=128
  const std::string_view name = kernel.name;
  if (const auto* s = std::get_if<Sm90BackwardSpec>(&kernel.spec); s != nullptr) {
    if (name == "sm90_backward" && s->bias != BiasTile::kNone && s->key_term && s->warps == 12 && s->tiles == 2) {
      return s->adds_bias ? kTwoBiasesAdded : kTwoBiases;
    }
    if (name == "sm90_backward" && s->halves && !s->same_step && s->dropout != DropoutRule::kNone) {
      return kHalvesWithDropout;
    }
    if (has_wide_parts(*s, name)) {
      return s->d > 160 ? kParts192 : kParts160;
    }
    if (s->converts && s->fp32_results) {
      return kExchanged;
    }
    if (name == "sm90_backward" && sm90_turns_dq(*s)) {
      return s->last_parts ? kByCopiesOf80InParts : kByCopiesOf80;
    }
    if (name == "sm90_backward" && s->tile_stores) {
      return kByCopiesOfV;
    }
    const bool few = (s->same_step && (s->banded || s->bias != BiasTile::kNone)) || (s->converts && s->warps == 12);
    return few ? kByCopies : kUsual;
  }
  if (const auto* s = std::get_if<Sm90BiasSpec>(&kernel.spec); s != nullptr) {
    const bool drops = s->dropout != DropoutRule::kNone && s->d == 128 && !s->banded && !s->ragged;
    return drops || s->bias == BiasTile::kFp32 ? kSummed : kUsual;
  }
  return kUsual;
}

// Bytes of local memory a thread.
inline int local(const Kernel& kernel) {
  const auto* s = std::get_if<Sm90BackwardSpec>(&kernel.spec);
  return s != nullptr && has_wide_parts(*s, kernel.name) && s->d > 160 ? 176 : 160;
}

// Registers of a thread, with as many blocks on a multiprocessor as the kernel counts on. Hopper's kernels but the
// forward share a multiprocessor's registers among the warpgroups of one block.
inline int registers(const Kernel& kernel) {
  constexpr int kOfMultiprocessor = 65536;
  const int blocks = std::visit(
      [&](const auto& spec) {
        if constexpr (requires { spec.ctas; }) {
          return spec.ctas;
        }
        const std::string_view name = kernel.name;
        return name.starts_with("sm90_") || name == "generic_wide_forward" ? 1 : 2;
      },
      kernel.spec);
  return kOfMultiprocessor / (kernel.threads * blocks);
}

}  // namespace fovea::cuda::limits
