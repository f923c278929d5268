// SPDX-License-Identifier: Apache-2.0
//
// What is added to scores or chooses among them: bias, bias2 and mask by NumPy's broadcasting; alibi_slopes; sink.
#include <tuple>

#include "core/validator.h"

namespace fovea {

// ---- bias, bias2, mask ----

void Validator::planes() {
  for (const auto& [name, tensor, traits, view] : {std::tuple("bias", given_.bias, &problem_.bias, &call_.bias),
                                                   std::tuple("bias2", given_.bias2, &problem_.bias2, &call_.bias2)}) {
    if (tensor != nullptr) {
      if (problem_.type == DType::kFp64) {
        type_of(name, *tensor, {DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
      } else {
        type_of(name, *tensor, {DType::kFp32, DType::kFp16, DType::kBf16},
                tensor->dtype == FOVEA_BOOL ? "; a bool goes into mask" : " (fp64 with fp64 q)");
      }
      *view = plane(name, *tensor, *traits);
    }
  }
  if (given_.mask != nullptr) {
    const bool integers = given_.mask->dtype == FOVEA_INT32 || given_.mask->dtype == FOVEA_INT64;
    type_of(
        "mask", *given_.mask, {DType::kBool},
        integers ? "; mask != 0 makes one of a mask of 0 and 1" : "; numbers that are added to scores go into bias");
    call_.mask = plane("mask", *given_.mask, problem_.mask);
  }
}

View Validator::plane(const char* name, const fovea_tensor& tensor, PlaneTraits& traits) const {
  const bool two_level = problem_.two_level;
  const std::int64_t scores[] = {problem_.batch1, problem_.batch2, problem_.heads_q, problem_.seqlen_q,
                                 problem_.seqlen_k};
  // One level: dimension 1 of the five does not exist.
  constexpr int kOneLevel[] = {0, 2, 3, 4};
  constexpr int kTwoLevels[] = {0, 1, 2, 3, 4};
  const int* dimension = two_level ? kTwoLevels : kOneLevel;
  const int rank = two_level ? 5 : 4;
  const auto given = strides_of(tensor);
  std::int64_t strides[5] = {};
  bool present[5] = {};
  bool broadcasts = tensor.rank <= rank;
  for (int i = 0; broadcasts && i < tensor.rank; ++i) {
    const int target = dimension[rank - tensor.rank + i];
    if (tensor.shape[i] != 1) {
      broadcasts = tensor.shape[i] == scores[target];
      present[target] = true;
      strides[target] = given[i];
    }
  }
  if (!broadcasts) {
    const char* longest = problem_.packed ? "max_seqlen_" : "S";
    // As other libraries have a mask of padding.
    const bool of_keys =
        !two_level && tensor.rank == 2 && tensor.shape[0] == problem_.batch1 && tensor.shape[1] == problem_.seqlen_k;
    refuse(
        "{}: shape {} does not broadcast to {}, Hq={}, {}q={}, {}k={}{}", name, shape_of(tensor),
        two_level ? fmt::format("B1={}, B2={}", problem_.batch1, problem_.batch2)
                  : fmt::format("B={}", problem_.batch1),
        problem_.heads_q, longest, problem_.seqlen_q, longest, problem_.seqlen_k,
        of_keys ? fmt::format("; did you mean {}x1x1x{}, one for each key?", problem_.batch1, problem_.seqlen_k) : "");
  }
  storage(name, tensor);
  traits.type = static_cast<DType>(tensor.dtype);
  traits.extents = {present[0], present[1], present[2], present[3], present[4]};
  return {tensor.data, traits.type, {strides[0], strides[1], strides[2], strides[3], strides[4]}};
}

// ---- alibi_slopes, sink ----

void Validator::vectors() {
  if (given_.alibi_slopes != nullptr) {
    const fovea_tensor& slopes = *given_.alibi_slopes;
    type_of("alibi_slopes", slopes, {accumulator()}, accumulator_hint());
    const bool per_batch = slopes.rank != 1;
    const bool two_level = per_batch && slopes.rank == 3 && problem_.two_level;
    Dims accepted{problem_.heads_q};
    if (two_level) {
      accepted = {problem_.batch1, problem_.batch2, problem_.heads_q};
    } else if (per_batch) {
      accepted = {problem_.batch(), problem_.heads_q};
    }
    shape_is("alibi_slopes", slopes, accepted, "(Hq), (B, Hq) or (B1, B2, Hq)");
    storage("alibi_slopes", slopes);
    problem_.alibi = per_batch ? Alibi::kPerBatchAndHead : Alibi::kPerHead;
    const auto s = strides_of(slopes);
    call_.alibi_slopes = {slopes.data, static_cast<DType>(slopes.dtype), {}};
    if (two_level) {
      call_.alibi_slopes.strides = {s[0], s[1], s[2], 0, 0};
    } else if (per_batch) {
      call_.alibi_slopes.strides = {s[0] * problem_.batch2, s[0], s[1], 0, 0};
    } else {
      call_.alibi_slopes.strides = {0, 0, s[0], 0, 0};
    }
  }
  if (given_.sink != nullptr) {
    call_.sink = sink_view("sink", *given_.sink);
    problem_.sink = true;
  }
}

const char* Validator::accumulator_hint() const {
  return problem_.type == DType::kFp64 ? ", as q is fp64" : " (fp64 with fp64 q)";
}

View Validator::sink_view(const char* name, const fovea_tensor& tensor) const {
  type_of(name, tensor, {accumulator()}, accumulator_hint());
  shape_is(name, tensor, {problem_.heads_q}, "(Hq)");
  storage(name, tensor);
  return {tensor.data, static_cast<DType>(tensor.dtype), {0, 0, strides_of(tensor)[0], 0, 0}};
}

}  // namespace fovea
