// SPDX-License-Identifier: Apache-2.0
//
// Every field of a Problem and every view of a Call, each named once, for whoever must not forget one: the key by which
// plans are kept, and backends that refuse what they do not know. A field that is added to a struct and not here does
// not compile.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <concepts>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/problem.h"

namespace fovea {

// What a field may change.
enum class Role {
  kPlan,     // which kernels compute, and how: kept plans are told apart by its value
  kNumber,   // a number: a plan knows at most whether it is given, or in which range it lies
  kLengths,  // where sequences end: read by kernels
  kCaller,   // what is done with the result, or which backend may compute it: no backend's plan depends on it
  kText,     // the text form alone
};

// A role that is known when it is compiled; a Role where one is wanted.
template <Role kRole>
using Of = std::integral_constant<Role, kRole>;

// visit(name, field, Of<role>) for each field, in the order of their declaration.
template <class P, class Visit>
requires std::same_as<std::remove_const_t<P>, Problem>
constexpr void for_each_field(P& problem, Visit visit) {
  auto& [direction, batch1, batch2, two_level, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v, type, layout,
         skew, packed, lengths_q, lengths_k, total_q, total_k, has_used_q, has_used_k, used_q, used_k, scale, softcap,
         causal, top_left, window_left, window_right, positions, position_q, position_k, has_positions_q,
         has_positions_k, positions_q, positions_k, bias, bias2, mask, alibi, sink, dropout, rng, seed, offset, streams,
         deterministic, clear_rows, lse, grad_lse, need, wide, accumulate, device, backend] = problem;
  visit("direction", direction, Of<Role::kPlan>{});
  visit("batch1", batch1, Of<Role::kPlan>{});
  visit("batch2", batch2, Of<Role::kPlan>{});
  visit("two_level", two_level, Of<Role::kText>{});
  visit("heads_q", heads_q, Of<Role::kPlan>{});
  visit("heads_k", heads_k, Of<Role::kPlan>{});
  visit("seqlen_q", seqlen_q, Of<Role::kPlan>{});
  visit("seqlen_k", seqlen_k, Of<Role::kPlan>{});
  visit("head_dim", head_dim, Of<Role::kPlan>{});
  visit("head_dim_v", head_dim_v, Of<Role::kPlan>{});
  visit("type", type, Of<Role::kPlan>{});
  visit("layout", layout, Of<Role::kText>{});
  visit("skew", skew, Of<Role::kText>{});
  visit("packed", packed, Of<Role::kPlan>{});
  visit("lengths_q", lengths_q, Of<Role::kLengths>{});
  visit("lengths_k", lengths_k, Of<Role::kLengths>{});
  visit("total_q", total_q, Of<Role::kPlan>{});
  visit("total_k", total_k, Of<Role::kPlan>{});
  visit("has_used_q", has_used_q, Of<Role::kPlan>{});
  visit("has_used_k", has_used_k, Of<Role::kPlan>{});
  visit("used_q", used_q, Of<Role::kLengths>{});
  visit("used_k", used_k, Of<Role::kLengths>{});
  visit("scale", scale, Of<Role::kNumber>{});
  visit("softcap", softcap, Of<Role::kNumber>{});
  visit("causal", causal, Of<Role::kPlan>{});
  visit("top_left", top_left, Of<Role::kPlan>{});
  visit("window_left", window_left, Of<Role::kPlan>{});
  visit("window_right", window_right, Of<Role::kPlan>{});
  visit("positions", positions, Of<Role::kPlan>{});
  visit("position_q", position_q, Of<Role::kNumber>{});
  visit("position_k", position_k, Of<Role::kNumber>{});
  visit("has_positions_q", has_positions_q, Of<Role::kPlan>{});
  visit("has_positions_k", has_positions_k, Of<Role::kPlan>{});
  visit("positions_q", positions_q, Of<Role::kLengths>{});
  visit("positions_k", positions_k, Of<Role::kLengths>{});
  visit("bias", bias, Of<Role::kPlan>{});
  visit("bias2", bias2, Of<Role::kPlan>{});
  visit("mask", mask, Of<Role::kPlan>{});
  visit("alibi", alibi, Of<Role::kPlan>{});
  visit("sink", sink, Of<Role::kPlan>{});
  visit("dropout", dropout, Of<Role::kNumber>{});
  visit("rng", rng, Of<Role::kPlan>{});
  visit("seed", seed, Of<Role::kNumber>{});
  visit("offset", offset, Of<Role::kNumber>{});
  visit("dropout_streams", streams, Of<Role::kPlan>{});
  visit("deterministic", deterministic, Of<Role::kPlan>{});
  visit("clear_rows", clear_rows, Of<Role::kCaller>{});
  visit("lse", lse, Of<Role::kPlan>{});
  visit("grad_lse", grad_lse, Of<Role::kPlan>{});
  visit("need", need, Of<Role::kPlan>{});
  visit("wide", wide, Of<Role::kPlan>{});
  visit("accumulate", accumulate, Of<Role::kPlan>{});
  visit("device", device, Of<Role::kCaller>{});
  visit("backend", backend, Of<Role::kCaller>{});
}

// visit(name, view, Of<role>): kPlan, where kernels depend on how the tensor lies; kNumber, where one reads it wherever
// it is.
template <class C, class Visit>
requires std::same_as<std::remove_const_t<C>, Call>
constexpr void for_each_view(C& call, Visit visit) {
  auto& [problem, rows, positions_q, positions_k, dropout, q, k, v, bias, bias2, mask, alibi_slopes, sink, streams, out,
         lse, grad_out, grad_lse, grad_q, grad_k, grad_v, grad_bias, grad_bias2, grad_sink, lengths, stream,
         device_index, seed_ptr, offset_ptr] = call;
  visit("q", q, Of<Role::kPlan>{});
  visit("k", k, Of<Role::kPlan>{});
  visit("v", v, Of<Role::kPlan>{});
  visit("bias", bias, Of<Role::kPlan>{});
  visit("bias2", bias2, Of<Role::kPlan>{});
  visit("mask", mask, Of<Role::kPlan>{});
  visit("alibi_slopes", alibi_slopes, Of<Role::kNumber>{});
  visit("sink", sink, Of<Role::kNumber>{});
  visit("dropout_streams", streams, Of<Role::kNumber>{});
  visit("out", out, Of<Role::kPlan>{});
  visit("lse", lse, Of<Role::kNumber>{});
  visit("grad_out", grad_out, Of<Role::kPlan>{});
  visit("grad_lse", grad_lse, Of<Role::kNumber>{});
  visit("grad_q", grad_q, Of<Role::kPlan>{});
  visit("grad_k", grad_k, Of<Role::kPlan>{});
  visit("grad_v", grad_v, Of<Role::kPlan>{});
  visit("grad_bias", grad_bias, Of<Role::kPlan>{});
  visit("grad_bias2", grad_bias2, Of<Role::kPlan>{});
  visit("grad_sink", grad_sink, Of<Role::kNumber>{});
}

// What a backend knows, by name: what it computes, or refuses itself. A field that changes what is computed (kPlan,
// kNumber) and that it does not name is refused wherever a call gives it another value than the usual one.
using FieldNames = std::vector<std::string_view>;

// The fields that `known` leaves out. `P` is Problem, or a test's with one more.
template <class P>
FieldNames unknown_fields(std::span<const std::string_view> known) {
  FieldNames unknown;
  const P usual;
  for_each_field(usual, [&](std::string_view name, const auto&, Role role) {
    if ((role == Role::kPlan || role == Role::kNumber) && std::find(known.begin(), known.end(), name) == known.end()) {
      unknown.push_back(name);
    }
  });
  return unknown;
}

// Calls visit(name, role, field, other's field) for each.
template <class P, class Visit>
void for_each_pair_of_fields(const P& problem, const P& other, Visit visit) {
  for_each_field(problem, [&](std::string_view name, const auto& field, Role role) {
    for_each_field(other, [&](std::string_view same, const auto& of_other, Role) {
      if constexpr (std::is_same_v<decltype(field), decltype(of_other)>) {
        if (name == same) {
          visit(name, role, field, of_other);
        }
      }
    });
  });
}

// Throws Error(FOVEA_UNSUPPORTED) where a problem gives one of `unknown`.
template <class P>
void refuse_fields(const P& problem, const FieldNames& unknown) {
  if (unknown.empty()) {
    return;
  }
  for_each_pair_of_fields(problem, P(), [&](std::string_view name, Role, const auto& field, const auto& by_default) {
    if (!(field == by_default) && std::find(unknown.begin(), unknown.end(), name) != unknown.end()) {
      throw Error(FOVEA_UNSUPPORTED, fmt::format("{}: this backend does not know it", name));
    }
  });
}

}  // namespace fovea
