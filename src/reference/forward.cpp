// SPDX-License-Identifier: Apache-2.0
//
// The forward, one row of scores at a time:
//
//     lse_i = log( sum over allowed j of exp(s_ij) + exp(sink) )
//     o_i   = sum over allowed j of keep_ij / (1 - p_drop) * exp(s_ij - lse_i) * v_j
//
// exp is taken relative to the row's maximum, so that no score overflows. Rows that do not exist (beyond seqused,
// past the last cu_seqlens) are left as they are.
#include "math/merge.h"
#include "reference/head.h"
#include "reference/reference.h"

namespace fovea::reference {
namespace {

// `q`, `k`, `v`: the rows of this head. Fills `out` and returns the row's logsumexp.
double forward_row(const Head<double>& head, i64 i, const double* q, const std::vector<double>& k,
                   const std::vector<double>& v, i64 head_dim, i64 head_dim_v, std::vector<double>& scores,
                   std::vector<double>& out) {
  const i64 keys = head.sequence().k_len;
  double maximum = head.sink();
  for (i64 j = 0; j < keys; ++j) {
    if (head.allowed(i, j)) {
      scores[j] = head.score(i, j, dot(q, k.data() + j * head_dim, head_dim)).value;
      maximum = math::max(maximum, scores[j]);
    }
  }
  const double reference = math::reference_of(maximum);
  double sum = 0;
  out.assign(static_cast<std::size_t>(head_dim_v), 0.0);
  for (i64 j = 0; j < keys; ++j) {
    if (!head.allowed(i, j)) {
      continue;
    }
    const double weight = math::weight(scores[j], reference);
    sum += weight;
    const double kept = weight * head.keep(i, j);
    for (i64 d = 0; d < head_dim_v; ++d) {
      out[d] += kept * v[j * head_dim_v + d];
    }
  }
  sum = math::sum_with_sink(sum, reference, head.sink());
  for (double& element : out) {
    element *= math::inverse_of_sum(sum);
  }
  return math::logsumexp(reference, sum);
}

}  // namespace

void forward(const Call& call) {
  const i64 head_dim = call.problem.head_dim;
  const i64 head_dim_v = call.problem.head_dim_v;
  View stored = call.out;  // merged before
  stored.accumulate = false;
  for (i64 b = 0; b < call.rows.batch(); ++b) {
    for (i64 h = 0; h < call.rows.heads_q; ++h) {
      const Head<double> head(call, b, h);
      const math::Sequence sequence = head.sequence();
      const i64 h_k = call.rows.head_k(h);
      const auto q = read_rows<double>(call, call.q, b, h, sequence.q_begin, sequence.q_len, head_dim);
      const auto k = read_rows<double>(call, call.k, b, h_k, sequence.k_begin, sequence.k_len, head_dim);
      const auto v = read_rows<double>(call, call.v, b, h_k, sequence.k_begin, sequence.k_len, head_dim_v);
      std::vector<double> scores(static_cast<std::size_t>(sequence.k_len));
      std::vector<double> out;
      for (i64 i = 0; i < sequence.q_len; ++i) {
        double lse = forward_row(head, i, q.data() + i * head_dim, k, v, head_dim, head_dim_v, scores, out);
        if (call.out.accumulate) {
          lse = merge_row(call, b, h, sequence.q_begin + i, lse, out);
        }
        write_rows(call, stored, b, h, sequence.q_begin + i, 1, head_dim_v, out.data());
        if (call.lse) {
          write_rows(call, call.lse, b, h, sequence.q_begin + i, 1, 1, &lse);
        }
      }
    }
  }
}

}  // namespace fovea::reference
