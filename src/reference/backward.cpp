// SPDX-License-Identifier: Apache-2.0
//
// The backward, from the saved out and logsumexp as they are given:
//
//     delta_i = <do_i, o_i> - dlse_i              p_ij = exp(s_ij - lse_i)
//     dp_ij   = keep_ij / (1 - p_drop) * <do_i, v_j>
//     ds_ij   = p_ij * (dp_ij - delta_i)
//     dv_j    = sum over i of keep_ij / (1 - p_drop) * p_ij * do_i
//     dq_i    = sum over j of ds_ij * s'_ij * k_j     (s' the derivative of the score by <q_i, k_j>)
//     dk_j    = sum over i of ds_ij * s'_ij * q_i
//     dbias   = sum of ds over the dimensions in which the bias is broadcast
//     dsink   = - sum over b, i of exp(sink - lse_i) * delta_i
//
// Everything is summed in doubles of the outputs' shapes and rounded once at the end. Rows that do not exist are
// left as they are; elements of a bias that no pair (i, j) touches get the gradient 0.
#include "reference/head.h"
#include "reference/reference.h"

namespace fovea::reference {
void backward(const Call& call) {
  const i64 head_dim = call.problem.head_dim;
  const i64 head_dim_v = call.problem.head_dim_v;
  const i64 group = call.rows.heads_k > 0 ? call.rows.heads_q / call.rows.heads_k : 0;
  BiasGradient<double> grad_bias(call, call.grad_bias, call.problem.bias);
  BiasGradient<double> grad_bias2(call, call.grad_bias2, call.problem.bias2);
  std::vector<double> grad_sink(static_cast<std::size_t>(call.rows.heads_q));

  for (i64 b = 0; b < call.rows.batch(); ++b) {
    const math::Sequence sequence = call.rows.sequence(b);
    for (i64 h_k = 0; h_k < call.rows.heads_k; ++h_k) {
      const auto k = read_rows<double>(call, call.k, b, h_k, sequence.k_begin, sequence.k_len, head_dim);
      const auto v = read_rows<double>(call, call.v, b, h_k, sequence.k_begin, sequence.k_len, head_dim_v);
      std::vector<double> grad_k(k.size());
      std::vector<double> grad_v(v.size());
      for (i64 h = h_k * group; h < (h_k + 1) * group; ++h) {
        const Head<double> head(call, b, h);
        for (i64 i = 0; i < sequence.q_len; ++i) {
          const i64 row = sequence.q_begin + i;
          const auto q = read_rows<double>(call, call.q, b, h, row, 1, head_dim);
          const auto out = read_rows<double>(call, call.out, b, h, row, 1, head_dim_v);
          const auto grad_out = read_rows<double>(call, call.grad_out, b, h, row, 1, head_dim_v);
          const double reference = math::backward_reference(read_rows<double>(call, call.lse, b, h, row, 1, 1)[0]);
          const double grad_lse = call.grad_lse ? read_rows<double>(call, call.grad_lse, b, h, row, 1, 1)[0] : 0;
          std::vector<double> grad_q(q.size());
          if (reference != math::Limits<double>::infinity()) {  // else the row is dead
            const double delta = math::delta(dot(grad_out.data(), out.data(), head_dim_v), grad_lse);
            for (i64 j = 0; j < sequence.k_len; ++j) {
              if (!head.allowed(i, j)) {
                continue;
              }
              const auto s = head.score(i, j, dot(q.data(), k.data() + j * head_dim, head_dim));
              const double p = math::probability(s.value, reference);
              const double keep = head.keep(i, j);
              const double dp = keep != 0 ? keep * dot(grad_out.data(), v.data() + j * head_dim_v, head_dim_v) : 0;
              const double ds = math::grad_score<true>(p, dp, delta);
              // What is dropped has no part in dv, not even as NaN.
              add_scaled(grad_v.data() + j * head_dim_v, keep != 0 ? p * keep : 0, grad_out.data(), head_dim_v);
              add_scaled(grad_q.data(), ds * s.derivative, k.data() + j * head_dim, head_dim);
              add_scaled(grad_k.data() + j * head_dim, ds * s.derivative, q.data(), head_dim);
              grad_bias.add(b, h, i, j, ds);
              grad_bias2.add(b, h, i, j, ds);
            }
            grad_sink[h] += math::grad_sink(head.sink(), reference, delta);
          }
          if (call.grad_q) {
            write_rows(call, call.grad_q, b, h, row, 1, head_dim, grad_q.data());
          }
        }
      }
      if (call.grad_k) {
        write_rows(call, call.grad_k, b, h_k, sequence.k_begin, sequence.k_len, head_dim, grad_k.data());
      }
      if (call.grad_v) {
        write_rows(call, call.grad_v, b, h_k, sequence.k_begin, sequence.k_len, head_dim_v, grad_v.data());
      }
    }
  }
  grad_bias.write();
  grad_bias2.write();
  for (i64 h = 0; call.grad_sink && h < call.rows.heads_q; ++h) {
    put(call.grad_sink, h * call.grad_sink.strides.head, grad_sink[h]);
  }
}

}  // namespace fovea::reference
