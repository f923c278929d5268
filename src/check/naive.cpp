// SPDX-License-Identifier: Apache-2.0
//
// forward.cpp and backward.cpp of the reference once more, with fp32 sums and roundings where a backend has them.
// Keys and columns are summed from the last to the first.
#include "check/naive.h"

#include <cmath>
#include <limits>

#include "reference/head.h"

namespace fovea::check {
namespace {

using math::i64;
using reference::add_scaled;
using reference::BiasGradient;
using reference::Head;
using reference::merge_row;
using reference::put;
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

// Errors of some units in the last place, up or down.
template <class T>
class Noise {
 public:
  explicit Noise(int draw) : state_(1 + static_cast<std::uint64_t>(draw) * 0xD1342543DE82EF95) {}

  // 1 or -1.
  T sign() { return (next() >> 63) != 0 ? T(1) : T(-1); }

  T uniform() { return static_cast<T>(static_cast<double>(next() >> 11) * 0x1p-53); }

  static T units(T count, T size) { return count * std::numeric_limits<T>::epsilon() * size; }

  T of_sum(T value, T size) { return value + sign() * units(kUnits / 2, size); }
  T of_function(T value) { return value * (1 + sign() * units(kUnits, 1)); }  // infinities stay

 private:
  std::uint64_t next() { return state_ = state_ * 6364136223846793005 + 1442695040888963407; }  // Knuth's MMIX

  static constexpr T kUnits = sizeof(T) == 8 ? 2 : 1;
  std::uint64_t state_;
};

// A dot product from the last term to the first, and the sum of its terms' magnitudes.
template <class T>
struct Dot {
  T sum = 0;
  T size = 0;

  Dot(const T* a, const T* b, i64 length) {
    for (i64 d = length - 1; d >= 0; --d) {
      sum += a[d] * b[d];
      size += math::abs(a[d] * b[d]);
    }
  }
};

template <class T>
struct Naive {
  const Call& call;
  const Arithmetic arithmetic;
  Noise<T> noise;
  const DType type = call.problem.type;
  const i64 head_dim = call.problem.head_dim;
  const i64 head_dim_v = call.problem.head_dim_v;

  // Of out, or of the gradient of q, k or v.
  DType type_of(bool wide) const { return wide ? DType::kFp32 : type; }

  // Kernels round P and dS before or after they are multiplied with what a row or a call has in common, or do not round
  // them. A result that is `wide` shows which: there a row of P or dS is rounded at any scale, so that a weight of 1
  // errs as well.
  T scale_of_rounding(bool wide) { return wide ? 1 - noise.uniform() / 2 : T(1); }

  T rounded_at(T scale, T value) const { return rounded(type, value * scale) / scale; }

  void forward() {
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
                   const std::vector<T>& v) {
    const math::Sequence& s = head.sequence();
    std::vector<T> scores(static_cast<std::size_t>(s.k_len));
    std::vector<T> out(static_cast<std::size_t>(head_dim_v));
    T maximum = head.sink();
    for (i64 j = s.k_len - 1; j >= 0; --j) {
      if (head.allowed(i, j)) {
        const Dot<T> dot(q, k.data() + j * head_dim, head_dim);
        scores[j] = score(head, i, j, dot).value;
        maximum = math::max(maximum, scores[j]);
      }
    }
    const T reference = math::reference_of(maximum);
    // Relative to the maximum the largest weight is 1, which no type rounds; kernels of GPUs take other references.
    const T scale = scale_of_rounding(call.problem.wide.out);
    T sum = 0;
    for (i64 j = s.k_len - 1; j >= 0; --j) {
      if (head.allowed(i, j)) {
        const T p = noise.of_function(math::weight(scores[j], reference));
        sum += p;
        add_scaled(out.data(), rounded_at(scale, p) * head.keep(i, j), v.data() + j * head_dim_v, head_dim_v);
      }
    }
    sum = math::sum_with_sink(sum, reference, head.sink());
    for (T& element : out) {
      element = rounded(type_of(call.problem.wide.out), element * math::inverse_of_sum(sum));
    }
    const T lse_exactly = math::logsumexp(reference, sum);
    T lse = sum == T(0) ? lse_exactly
                        : noise.of_sum(lse_exactly, math::abs(reference) + math::abs(lse_exactly - reference));
    View stored = call.out;
    if (stored.accumulate) {
      lse = merge_row(call, b, h, s.q_begin + i, lse, out);
      stored.accumulate = false;
    }
    write_rows(call, stored, b, h, s.q_begin + i, 1, head_dim_v, out.data());
    if (call.lse) {
      write_rows(call, call.lse, b, h, s.q_begin + i, 1, 1, &lse);
    }
  }

  // head.score(), with the errors of this evaluation.
  math::Dual<T> score(const Head<T>& head, i64 i, i64 j, const Dot<T>& dot) {
    const bool gpu = arithmetic == Arithmetic::kGpu;
    const bool tensor_cores = gpu && size_of(type) == 2;
    const i64 steps = (head_dim + 15) / 16;
    const T cut = tensor_cores ? noise.units(T(0.5) * static_cast<T>(steps), dot.sum) : T(0);
    math::Dual<T> s = head.score(i, j, noise.of_sum(dot.sum, dot.size) - cut);
    const auto softcap = static_cast<T>(call.problem.softcap);
    const auto scale = static_cast<T>(call.problem.scale_or_default());
    if (gpu && softcap > 0 && scale != 0) {
      const T square = math::max(T(0), 1 - s.derivative / scale);  // of the tanh
      const T error = noise.sign() * noise.units(1, 1);
      s.value += error * softcap * std::sqrt(square);
      s.derivative -= error * 2 * square * scale;
    }
    return s;
  }

  void backward() {
    const i64 group = call.rows.heads_k > 0 ? call.rows.heads_q / call.rows.heads_k : 0;
    BiasGradient<T> grad_bias(call, call.grad_bias, call.problem.bias);
    BiasGradient<T> grad_bias2(call, call.grad_bias2, call.problem.bias2);
    std::vector<T> grad_sink(static_cast<std::size_t>(call.rows.heads_q));
    std::vector<T> grad_sink_size(grad_sink.size());
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
            const Share share = backward_row(head, b, h, i, k, v, grad_k, grad_v, grad_bias, grad_bias2);
            grad_sink[h] += share.value;
            grad_sink_size[h] += share.size;
          }
        }
        round_all(type_of(call.problem.wide.k), grad_k);
        round_all(type_of(call.problem.wide.v), grad_v);
        if (call.grad_k) {
          write_rows(call, call.grad_k, b, h_k, s.k_begin, s.k_len, head_dim, grad_k.data());
        }
        if (call.grad_v) {
          write_rows(call, call.grad_v, b, h_k, s.k_begin, s.k_len, head_dim_v, grad_v.data());
        }
      }
    }
    const auto of_bias = [](const PlaneTraits& bias, bool wide) { return wide ? DType::kFp32 : bias.type; };
    round_all(of_bias(call.problem.bias, call.problem.wide.bias), grad_bias.sums());
    grad_bias.write();
    round_all(of_bias(call.problem.bias2, call.problem.wide.bias2), grad_bias2.sums());
    grad_bias2.write();
    for (i64 h = 0; call.grad_sink && h < call.rows.heads_q; ++h) {
      put(call.grad_sink, h * call.grad_sink.strides.head, noise.of_sum(grad_sink[h], grad_sink_size[h]));
    }
  }

  // A row's share of the sink's gradient, and the size of what it is made of: a head has but one such sum, so it errs
  // in full, whatever the luck of signs.
  struct Share {
    T value;
    T size;
  };

  Share backward_row(const Head<T>& head, i64 b, i64 h, i64 i, const std::vector<T>& k, const std::vector<T>& v,
                     std::vector<T>& grad_k, std::vector<T>& grad_v, BiasGradient<T>& grad_bias,
                     BiasGradient<T>& grad_bias2) {
    const math::Sequence& s = head.sequence();
    const i64 row = s.q_begin + i;
    const auto q = read_rows<T>(call, call.q, b, h, row, 1, head_dim);
    const auto out = read_rows<T>(call, call.out, b, h, row, 1, head_dim_v);
    const auto grad_out = read_rows<T>(call, call.grad_out, b, h, row, 1, head_dim_v);
    const T lse = math::backward_reference(read_rows<T>(call, call.lse, b, h, row, 1, 1)[0]);
    const T grad_lse = call.grad_lse ? read_rows<T>(call, call.grad_lse, b, h, row, 1, 1)[0] : 0;
    const bool dead = lse == math::Limits<T>::infinity();
    const Dot<T> out_dot(grad_out.data(), out.data(), head_dim_v);
    // dp and delta err against each other, and delta for all of a row at once: where both nearly cancel, luck must not
    // hide what they are off by.
    const T sign = noise.sign();
    const T delta = math::delta(out_dot.sum + sign * noise.units(1, out_dot.size), grad_lse);
    const T scale_ds = scale_of_rounding(call.problem.wide.q || call.problem.wide.k);
    const T scale_p = scale_of_rounding(call.problem.wide.v);
    std::vector<T> grad_q(q.size());
    for (i64 j = s.k_len - 1; j >= 0 && !dead; --j) {
      if (!head.allowed(i, j)) {
        continue;
      }
      const Dot<T> dot(q.data(), k.data() + j * head_dim, head_dim);
      const math::Dual<T> s_ij = score(head, i, j, dot);
      const T p = noise.of_function(math::probability(s_ij.value, lse));
      const T keep = head.keep(i, j);
      const Dot<T> value_dot(grad_out.data(), v.data() + j * head_dim_v, head_dim_v);
      const T dp = keep * (value_dot.sum - sign * noise.units(1, value_dot.size));
      const T ds = math::grad_score<true>(p, dp, delta);
      const T ds_of_dot = rounded_at(scale_ds, ds * s_ij.derivative);
      add_scaled(grad_v.data() + j * head_dim_v, keep != 0 ? rounded_at(scale_p, p * keep) : T(0), grad_out.data(),
                 head_dim_v);
      add_scaled(grad_q.data(), ds_of_dot, k.data() + j * head_dim, head_dim);
      add_scaled(grad_k.data() + j * head_dim, ds_of_dot, q.data(), head_dim);
      grad_bias.add(b, h, i, j, ds);
      grad_bias2.add(b, h, i, j, ds);
    }
    round_all(type_of(call.problem.wide.q), grad_q);
    if (call.grad_q) {
      write_rows(call, call.grad_q, b, h, row, 1, head_dim, grad_q.data());
    }
    if (dead) {
      return {};
    }
    const T value = math::grad_sink(head.sink(), lse, delta);
    return {value, math::abs(value) + math::abs(math::grad_sink(head.sink(), lse, out_dot.size))};
  }
};

}  // namespace

void naive_forward(const Call& call, Arithmetic arithmetic, int draw) {
  if (call.problem.type == DType::kFp64) {
    Naive<double>{call, arithmetic, Noise<double>(draw)}.forward();
  } else {
    Naive<float>{call, arithmetic, Noise<float>(draw)}.forward();
  }
}

void naive_backward(const Call& call, Arithmetic arithmetic, int draw) {
  if (call.problem.type == DType::kFp64) {
    Naive<double>{call, arithmetic, Noise<double>(draw)}.backward();
  } else {
    Naive<float>{call, arithmetic, Noise<float>(draw)}.backward();
  }
}

}  // namespace fovea::check
