// SPDX-License-Identifier: Apache-2.0
//
// forward.cpp and backward.cpp of the reference once more, with fp32 sums and roundings where a backend has them.
// Keys and columns are summed from the last to the first, so that sums in fp64 differ from the reference's too.
#include "check/naive.h"

#include "reference/head.h"

namespace fovea::check {
namespace {

using math::i64;
using reference::add_scaled;
using reference::BiasGradient;
using reference::Head;
using reference::read_rows;
using reference::write_rows;

// The nearest value that the type has.
template <class T>
T rounded(DType type, T value) {
  std::uint64_t memory = 0;
  store(&memory, type, 0, value);
  return static_cast<T>(load(&memory, type, 0));
}

template <class T>
void round_all(DType type, std::vector<T>& values) {
  for (T& value : values) {
    value = rounded(type, value);
  }
}

template <class T>
T dot_from_the_end(const T* a, const T* b, i64 length) {
  T sum = 0;
  for (i64 d = length - 1; d >= 0; --d) {
    sum += a[d] * b[d];
  }
  return sum;
}

template <class T>
struct Naive {
  const Call& call;
  const DType type = call.problem.type;
  const i64 head_dim = call.problem.head_dim;
  const i64 head_dim_v = call.problem.head_dim_v;

  void forward() const {
    for (i64 b = 0; b < call.rows.batch(); ++b) {
      for (i64 h = 0; h < call.rows.heads_q; ++h) {
        const Head<T> head(call, b, h);
        const math::Sequence& s = head.sequence();
        const i64 h_k = call.rows.head_k(h);
        const auto q = read_rows<T>(call, call.q, b, h, s.q_begin, s.q_len, head_dim);
        const auto k = read_rows<T>(call, call.k, b, h_k, s.k_begin, s.k_len, head_dim);
        const auto v = read_rows<T>(call, call.v, b, h_k, s.k_begin, s.k_len, head_dim_v);
        for (i64 i = 0; i < s.q_len; ++i) {
          forward_row(head, b, h, i, q.data() + i * head_dim, k, v);
        }
      }
    }
  }

  void forward_row(const Head<T>& head, i64 b, i64 h, i64 i, const T* q, const std::vector<T>& k,
                   const std::vector<T>& v) const {
    const math::Sequence& s = head.sequence();
    std::vector<T> scores(static_cast<std::size_t>(s.k_len));
    std::vector<T> out(static_cast<std::size_t>(head_dim_v));
    T maximum = head.sink();
    for (i64 j = s.k_len - 1; j >= 0; --j) {
      if (head.allowed(i, j)) {
        scores[j] = head.score(i, j, dot_from_the_end(q, k.data() + j * head_dim, head_dim)).value;
        maximum = math::max(maximum, scores[j]);
      }
    }
    const T reference = math::reference_of(maximum);
    T sum = 0;
    for (i64 j = s.k_len - 1; j >= 0; --j) {
      if (head.allowed(i, j)) {
        const T p = math::weight(scores[j], reference);
        sum += p;
        add_scaled(out.data(), rounded(type, p) * head.keep(i, j), v.data() + j * head_dim_v, head_dim_v);
      }
    }
    sum = math::sum_with_sink(sum, reference, head.sink());
    for (T& element : out) {
      element = rounded(type, element * math::inverse_of_sum(sum));
    }
    const T lse = math::logsumexp(reference, sum);
    write_rows(call, call.out, b, h, s.q_begin + i, 1, head_dim_v, out.data());
    if (call.lse) {
      write_rows(call, call.lse, b, h, s.q_begin + i, 1, 1, &lse);
    }
  }

  void backward() const {
    const i64 group = call.rows.heads_k > 0 ? call.rows.heads_q / call.rows.heads_k : 0;
    BiasGradient<T> grad_bias(call, call.grad_bias, call.problem.bias);
    BiasGradient<T> grad_bias2(call, call.grad_bias2, call.problem.bias2);
    std::vector<T> grad_sink(static_cast<std::size_t>(call.rows.heads_q));
    for (i64 b = 0; b < call.rows.batch(); ++b) {
      const math::Sequence s = call.rows.sequence(b);
      for (i64 h_k = 0; h_k < call.rows.heads_k; ++h_k) {
        const auto k = read_rows<T>(call, call.k, b, h_k, s.k_begin, s.k_len, head_dim);
        const auto v = read_rows<T>(call, call.v, b, h_k, s.k_begin, s.k_len, head_dim_v);
        std::vector<T> grad_k(k.size());
        std::vector<T> grad_v(v.size());
        for (i64 h = (h_k + 1) * group - 1; h >= h_k * group; --h) {
          const Head<T> head(call, b, h);
          for (i64 i = s.q_len - 1; i >= 0; --i) {
            grad_sink[h] += backward_row(head, b, h, i, k, v, grad_k, grad_v, grad_bias, grad_bias2);
          }
        }
        round_all(type, grad_k);
        round_all(type, grad_v);
        if (call.grad_k) {
          write_rows(call, call.grad_k, b, h_k, s.k_begin, s.k_len, head_dim, grad_k.data());
        }
        if (call.grad_v) {
          write_rows(call, call.grad_v, b, h_k, s.k_begin, s.k_len, head_dim_v, grad_v.data());
        }
      }
    }
    round_all(call.problem.bias.type, grad_bias.sums());
    grad_bias.write();
    round_all(call.problem.bias2.type, grad_bias2.sums());
    grad_bias2.write();
    for (i64 h = 0; call.grad_sink && h < call.rows.heads_q; ++h) {
      store(call.grad_sink.data, call.grad_sink.type, h * call.grad_sink.strides.head, grad_sink[h]);
    }
  }

  // Returns the row's share of the sink's gradient.
  T backward_row(const Head<T>& head, i64 b, i64 h, i64 i, const std::vector<T>& k, const std::vector<T>& v,
                 std::vector<T>& grad_k, std::vector<T>& grad_v, BiasGradient<T>& grad_bias,
                 BiasGradient<T>& grad_bias2) const {
    const math::Sequence& s = head.sequence();
    const i64 row = s.q_begin + i;
    const auto q = read_rows<T>(call, call.q, b, h, row, 1, head_dim);
    const auto out = read_rows<T>(call, call.out, b, h, row, 1, head_dim_v);
    const auto grad_out = read_rows<T>(call, call.grad_out, b, h, row, 1, head_dim_v);
    const T lse = math::backward_reference(read_rows<T>(call, call.lse, b, h, row, 1, 1)[0]);
    const T grad_lse = call.grad_lse ? read_rows<T>(call, call.grad_lse, b, h, row, 1, 1)[0] : 0;
    const bool dead = lse == math::Limits<T>::infinity();
    const T delta = math::delta(dot_from_the_end(grad_out.data(), out.data(), head_dim_v), grad_lse);
    std::vector<T> grad_q(q.size());
    for (i64 j = s.k_len - 1; j >= 0 && !dead; --j) {
      if (!head.allowed(i, j)) {
        continue;
      }
      const auto score = head.score(i, j, dot_from_the_end(q.data(), k.data() + j * head_dim, head_dim));
      const T p = math::probability(score.value, lse);
      const T keep = head.keep(i, j);
      const T dp = keep * dot_from_the_end(grad_out.data(), v.data() + j * head_dim_v, head_dim_v);
      const T ds = math::grad_score(p, dp, delta);
      const T ds_of_dot = rounded(type, ds * score.derivative);
      add_scaled(grad_v.data() + j * head_dim_v, rounded(type, p * keep), grad_out.data(), head_dim_v);
      add_scaled(grad_q.data(), ds_of_dot, k.data() + j * head_dim, head_dim);
      add_scaled(grad_k.data() + j * head_dim, ds_of_dot, q.data(), head_dim);
      grad_bias.add(b, h, i, j, ds);
      grad_bias2.add(b, h, i, j, ds);
    }
    round_all(type, grad_q);
    if (call.grad_q) {
      write_rows(call, call.grad_q, b, h, row, 1, head_dim, grad_q.data());
    }
    return dead ? T(0) : math::grad_sink(head.sink(), lse, delta);
  }
};

}  // namespace

void naive_forward(const Call& call) {
  call.problem.type == DType::kFp64 ? Naive<double>{call}.forward() : Naive<float>{call}.forward();
}

void naive_backward(const Call& call) {
  call.problem.type == DType::kFp64 ? Naive<double>{call}.backward() : Naive<float>{call}.backward();
}

}  // namespace fovea::check
