// SPDX-License-Identifier: Apache-2.0
//
// Out, lse and the gradients, and those that are added to what their memory holds.
#include <tuple>
#include <utility>

#include "core/validator.h"

namespace fovea {

// ---- out, lse, gradients ----

View Validator::like(const char* name, const fovea_tensor& tensor, const fovea_tensor& model, std::int64_t last,
                     const char* names, bool* wide) const {
  if (wide != nullptr && size_of(problem_.type) == 2) {
    type_of(name, tensor, {problem_.type, DType::kFp32}, ", the type of q or fp32");
    *wide = tensor.dtype == FOVEA_FP32;
  } else {
    type_of(name, tensor, {problem_.type}, ", the type of q");
  }
  Dims accepted(model.shape, model.shape + model.rank);
  accepted.back() = last;
  shape_is(name, tensor, accepted, names);
  storage(name, tensor);
  return rows_view(tensor);
}

View Validator::lse_view(const char* name, const fovea_tensor& tensor) const {
  type_of(name, tensor, {accumulator()}, accumulator_hint());
  const auto s = strides_of(tensor);
  View view{tensor.data, static_cast<DType>(tensor.dtype), {}};
  if (problem_.packed) {
    shape_is(name, tensor, {problem_.heads_q, problem_.total_q}, "(Hq, total_q)");
    view.strides = {0, 0, s[0], s[1], 0};
  } else if (problem_.two_level) {
    shape_is(name, tensor, {problem_.batch1, problem_.batch2, problem_.heads_q, problem_.seqlen_q}, "(B1, B2, Hq, Sq)");
    view.strides = {s[0], s[1], s[2], s[3], 0};
  } else {
    shape_is(name, tensor, {problem_.batch1, problem_.heads_q, problem_.seqlen_q}, "(B, Hq, Sq)");
    view.strides = {s[0], 0, s[1], s[2], 0};
  }
  storage(name, tensor);
  return view;
}

void Validator::results() {
  const char* of_q = problem_.packed ? "(total_q, Hq, D)" : "(B, Sq, Hq, D)";
  const char* of_out = problem_.packed ? "(total_q, Hq, Dv)" : "(B, Sq, Hq, Dv)";
  const std::int64_t dv = problem_.head_dim_v;
  call_.out = like("out", required("out", given_.out, of_out), *given_.q, dv, of_out, &problem_.wide.out);
  if (!backward_) {
    problem_.lse = given_.lse != nullptr;
    if (problem_.lse) {
      call_.lse = lse_view("lse", *given_.lse);
    }
    accumulate();
    return;
  }
  call_.lse = lse_view("lse", required("lse", given_.lse, "the forward's logsumexp, which the backward reads"));
  call_.grad_out =
      like("grad_out", required("grad_out", given_.grad_out, "the gradient of out"), *given_.q, dv, of_out, nullptr);
  problem_.grad_lse = given_.grad_lse != nullptr;
  if (problem_.grad_lse) {
    call_.grad_lse = lse_view("grad_lse", *given_.grad_lse);
  }
  if (given_.grad_q != nullptr) {
    call_.grad_q = like("grad_q", *given_.grad_q, *given_.q, problem_.head_dim, of_q, &problem_.wide.q);
    problem_.need.q = true;
  }
  if (given_.grad_k != nullptr) {
    call_.grad_k = like("grad_k", *given_.grad_k, *given_.k, problem_.head_dim, "the shape of k", &problem_.wide.k);
    problem_.need.k = true;
  }
  if (given_.grad_v != nullptr) {
    call_.grad_v = like("grad_v", *given_.grad_v, *given_.v, dv, "the shape of v", &problem_.wide.v);
    problem_.need.v = true;
  }
  for (const auto& [name, gradient, of, tensor, view, need, wide] :
       {std::tuple("grad_bias", given_.grad_bias, "bias", given_.bias, &call_.grad_bias, &problem_.need.bias,
                   &problem_.wide.bias),
        std::tuple("grad_bias2", given_.grad_bias2, "bias2", given_.bias2, &call_.grad_bias2, &problem_.need.bias2,
                   &problem_.wide.bias2)}) {
    if (gradient != nullptr) {
      *view = grad_plane(name, *gradient, of, tensor, *wide);
      *need = true;
    }
  }
  if (given_.grad_sink != nullptr) {
    if (given_.sink == nullptr) {
      refuse("grad_sink: given without sink; accepted: a gradient of what is given");
    }
    call_.grad_sink = sink_view("grad_sink", *given_.grad_sink);
    problem_.need.sink = true;
  }
  if (problem_.need == Results{}) {
    refuse("gradients: none given; accepted: at least one of grad_q, grad_k, grad_v, grad_bias, grad_bias2, grad_sink");
  }
  accumulate();
}

void Validator::accumulate() {
  struct Result {
    std::uint64_t bit;
    const char* name;
    View* view;
    bool* said;
  };
  Results& results = problem_.accumulate;
  const Result all[] = {
      {FOVEA_ACCUMULATE_OUT, "out", &call_.out, &results.out},
      {FOVEA_ACCUMULATE_GRAD_Q, "grad_q", &call_.grad_q, &results.q},
      {FOVEA_ACCUMULATE_GRAD_K, "grad_k", &call_.grad_k, &results.k},
      {FOVEA_ACCUMULATE_GRAD_V, "grad_v", &call_.grad_v, &results.v},
      {FOVEA_ACCUMULATE_GRAD_BIAS, "grad_bias", &call_.grad_bias, &results.bias},
      {FOVEA_ACCUMULATE_GRAD_BIAS2, "grad_bias2", &call_.grad_bias2, &results.bias2},
      {FOVEA_ACCUMULATE_GRAD_SINK, "grad_sink", &call_.grad_sink, &results.sink},
  };
  std::uint64_t known = 0;
  for (const auto& [bit, name, view, said] : all) {
    known |= bit;
    if ((given_.accumulate & bit) == 0) {
      continue;
    }
    if (backward_ == (bit == FOVEA_ACCUMULATE_OUT)) {
      refuse("accumulate: {} in a {}; accepted: its results", name, backward_ ? "backward" : "forward");
    }
    if (!*view) {
      refuse("accumulate: {}, which is not given; accepted: results that are", name);
    }
    if (size_of(view->type) == 2) {
      refuse("accumulate: {}, which is {}; accepted: results of fp32 or fp64", name, name_of(view->type));
    }
    view->accumulate = *said = true;
  }
  if ((given_.accumulate & ~known) != 0) {
    refuse("accumulate: {:#x}; accepted: bits of {:#x}, FOVEA_ACCUMULATE_OUT, _GRAD_Q, ...", given_.accumulate, known);
  }
  if (results.out && !problem_.lse) {
    refuse("lse: NULL with FOVEA_ACCUMULATE_OUT; accepted: the logsumexp of the result that out holds");
  }
}

View Validator::grad_plane(const char* name, const fovea_tensor& gradient, const char* of, const fovea_tensor* tensor,
                           bool& wide) const {
  if (tensor == nullptr) {
    refuse("{}: given without {}; accepted: a gradient of what is given", name, of);
  }
  const auto type = static_cast<DType>(tensor->dtype);
  if (size_of(type) == 2) {
    type_of(name, gradient, {type, DType::kFp32}, ", the type of the bias or fp32");
    wide = gradient.dtype == FOVEA_FP32;
  } else {
    type_of(name, gradient, {type}, ", the type of the bias");
  }
  shape_is(name, gradient, Dims(tensor->shape, tensor->shape + tensor->rank), "the shape of the bias as given");
  PlaneTraits traits;
  return plane(name, gradient, traits);
}

}  // namespace fovea
