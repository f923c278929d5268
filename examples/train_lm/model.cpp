// SPDX-License-Identifier: Apache-2.0
//
// Rows (tokens) are independent everywhere but in attention and in the weights' gradients. So a layer's work goes in
// chunks of rows, small enough that a chunk's intermediate values stay in a core's cache, and the products that sum
// over rows come afterwards, in blocks of the result. Neither depends on the number of threads.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "parallel.h"
#include "stopwatch.h"

namespace train_lm {
namespace {

constexpr std::int64_t kBytes = 256;
constexpr std::int64_t kRowsInChunk = 256;
constexpr std::int64_t kColumnsInBlock = 64;

void for_chunks(std::int64_t rows, const std::function<void(std::int64_t begin, std::int64_t count)>& body) {
  parallel_for((rows + kRowsInChunk - 1) / kRowsInChunk, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * kRowsInChunk;
    body(begin, std::min(kRowsInChunk, rows - begin));
  });
}

// n = x / rms(x), row by row; `inverse` keeps 1 / rms(x).
template <class X, class N, class I>
void normalize(const X& x, N&& normed, I&& inverse) {
  using T = typename std::decay_t<N>::Scalar;
  inverse.array() = (x.rowwise().squaredNorm().array() / T(x.cols()) + T(1e-5)).rsqrt();
  normed = x.array().colwise() * inverse.array();
}

// dx += (dn - n * mean(dn * n)) / rms(x)
template <class D, class N, class I, class X>
void add_normalize_gradient(const D& grad_normed, const N& normed, const I& inverse, X&& grad_x) {
  using T = typename std::decay_t<X>::Scalar;
  const auto mean = ((grad_normed.array() * normed.array()).rowwise().sum() / T(normed.cols())).eval();
  grad_x.array() += (grad_normed.array() - normed.array().colwise() * mean).colwise() * inverse.array();
}

// gelu(x) = x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3)
constexpr double kGeluSlope = 0.7978845608028654;
constexpr double kGeluCubic = 0.044715;

template <class X, class Y>
void gelu(const X& x, Y&& y) {
  using T = typename std::decay_t<Y>::Scalar;
  y = T(0.5) * x.array() * (T(1) + (T(kGeluSlope) * x.array() * (T(1) + T(kGeluCubic) * x.array().square())).tanh());
}

// dy, in place, becomes dy * gelu'(x).
template <class X, class D>
void multiply_by_gelu_derivative(const X& x, D&& grad) {
  using T = typename std::decay_t<D>::Scalar;
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const auto v = x.row(row).array();
    const auto t = (T(kGeluSlope) * v * (T(1) + T(kGeluCubic) * v.square())).tanh().eval();
    const auto du = T(kGeluSlope) * (T(1) + T(3 * kGeluCubic) * v.square());
    grad.row(row).array() *= T(0.5) * (T(1) + t) + T(0.5) * v * (T(1) - t.square()) * du;
  }
}

// result = a^T b over all rows, in blocks of columns.
template <class A, class B, class R>
void transposed_product(const A& a, const B& b, R&& result) {
  const std::int64_t columns = b.cols();
  parallel_for((columns + kColumnsInBlock - 1) / kColumnsInBlock, [&](std::int64_t block) {
    const std::int64_t begin = block * kColumnsInBlock;
    const std::int64_t count = std::min(kColumnsInBlock, columns - begin);
    result.middleCols(begin, count).noalias() = a.transpose() * b.middleCols(begin, count);
  });
}

}  // namespace

// ---- parameters ----

template <class T>
Model<T>::Model(const ModelConfig& config) : config_(config) {
  const std::int64_t width = config.width;
  embedding_ = add("embedding", kBytes, width, false);
  for (std::int64_t n = 0; n < config.layers; ++n) {
    const std::string prefix = "layer" + std::to_string(n) + ".";
    layers_.push_back({add(prefix + "qkv", width, 3 * width, true, 3),
                       add(prefix + "bias", config.heads, config.context, false),
                       add(prefix + "out", width, width, true),
                       add(prefix + "up", width, 4 * width, true),
                       add(prefix + "down", 4 * width, width, true),
                       AttentionLayer<T>(config.attention, config.heads, config.context),
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {}});
  }
  head_ = add("head", width, kBytes, false);
  initialize();
}

template <class T>
Parameter Model<T>::add(const std::string& name, std::int64_t rows, std::int64_t columns, bool is_matrix,
                        std::int64_t parts) {
  Parameter p{name, static_cast<std::int64_t>(parameters_.size()), rows, columns, is_matrix, parts};
  layout_.push_back(p);
  parameters_.resize(parameters_.size() + p.size());
  gradients_.resize(parameters_.size());
  return p;
}

// What writes to the stream, and the head, start at zero: the first loss is that of no knowledge, ln 256. The bias
// starts as ALiBi, nearer bytes first, at another slope for each head; from there it learns.
template <class T>
void Model<T>::initialize() {
  std::mt19937_64 random(config_.seed);
  const auto fill = [&](const Parameter& p, double deviation) {
    Map w = weights(p);
    for (Eigen::Index i = 0; i < w.size(); ++i) {
      // A sum of twelve uniforms: normal enough, and the same numbers with every standard library.
      double sum = -6;
      for (int n = 0; n < 12; ++n) {
        sum += static_cast<double>(random() >> 11) * 0x1p-53;
      }
      w.data()[i] = static_cast<T>(deviation * sum);
    }
  };
  const double fan_in = 1 / std::sqrt(static_cast<double>(config_.width));
  fill(embedding_, 0.1);
  for (Layer& layer : layers_) {
    fill(layer.qkv, fan_in);
    fill(layer.up, fan_in);
    Map bias = weights(layer.bias);
    for (Eigen::Index h = 0; h < bias.rows(); ++h) {
      const double slope = std::exp2(-8.0 * static_cast<double>(h) / static_cast<double>(bias.rows()));
      for (Eigen::Index distance = 0; distance < bias.cols(); ++distance) {
        bias(h, distance) = static_cast<T>(-slope * static_cast<double>(distance));
      }
    }
  }
}

template <class T>
AttentionShape Model<T>::shape_of(const Batch& batch) const {
  return {batch.rows, batch.length, config_.heads, config_.width / config_.heads};
}

template <class T>
AttentionDropout Model<T>::dropout_of(double p, std::uint64_t step, std::size_t layer) const {
  return {p, config_.seed, step * static_cast<std::uint64_t>(config_.layers) + layer};
}

// ---- forward ----

template <class T>
void Model<T>::forward(const Batch& batch, double dropout, std::uint64_t step) {
  const AttentionShape shape = shape_of(batch);
  const std::int64_t tokens = shape.tokens();
  const std::int64_t width = config_.width;
  stream_.resize(tokens, width);
  const Map embedding = weights(embedding_);
  for (std::int64_t t = 0; t < tokens; ++t) {
    stream_.row(t) = embedding.row(batch.inputs[t]);
  }
  for (std::size_t n = 0; n < layers_.size(); ++n) {
    Layer& layer = layers_[n];
    for (Matrix* m : {&layer.normed_in, &layer.mixed, &layer.normed_mid}) {
      m->resize(tokens, width);
    }
    layer.qkv_rows.resize(tokens, 3 * width);
    layer.raised.resize(tokens, 4 * width);
    layer.activated.resize(tokens, 4 * width);
    layer.inverse_in.resize(tokens);
    layer.inverse_mid.resize(tokens);

    const Map qkv = weights(layer.qkv);
    for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
      auto normed = layer.normed_in.middleRows(begin, count);
      normalize(stream_.middleRows(begin, count), normed, layer.inverse_in.segment(begin, count));
      layer.qkv_rows.middleRows(begin, count).noalias() = normed * qkv;
    });
    {
      const Stopwatch stopwatch(attention_seconds_);
      layer.attention.forward(shape, layer.qkv_rows.data(), weights(layer.bias).data(), dropout_of(dropout, step, n),
                              layer.mixed.data(), scratch_);
    }
    const Map out = weights(layer.out);
    const Map up = weights(layer.up);
    const Map down = weights(layer.down);
    for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
      auto x = stream_.middleRows(begin, count);
      x.noalias() += layer.mixed.middleRows(begin, count) * out;
      auto normed = layer.normed_mid.middleRows(begin, count);
      normalize(x, normed, layer.inverse_mid.segment(begin, count));
      auto raised = layer.raised.middleRows(begin, count);
      raised.noalias() = normed * up;
      auto activated = layer.activated.middleRows(begin, count);
      gelu(raised, activated);
      x.noalias() += activated * down;
    });
  }
  normed_out_.resize(tokens, width);
  inverse_out_.resize(tokens);
  logits_.resize(tokens, kBytes);
  const Map head = weights(head_);
  for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
    auto normed = normed_out_.middleRows(begin, count);
    normalize(stream_.middleRows(begin, count), normed, inverse_out_.segment(begin, count));
    logits_.middleRows(begin, count).noalias() = normed * head;
  });
}

template <class T>
void Model<T>::forward_without_dropout(const Batch& batch) {
  const double seconds = attention_seconds_;
  forward(batch, 0, 0);
  attention_seconds_ = seconds;  // training's alone are counted
}

template <class T>
HeldOutLoss Model<T>::evaluate(const Batch& batch) {
  forward_without_dropout(batch);
  HeldOutLoss loss;
  for (Eigen::Index t = 0; t < logits_.rows(); ++t) {
    if (batch.scored[t] != 0) {
      const T highest = logits_.row(t).maxCoeff();
      const double sum = static_cast<double>((logits_.row(t).array() - highest).exp().sum());
      loss.nats += std::log(sum) - static_cast<double>(logits_(t, batch.targets[t]) - highest);
      ++loss.bytes;
    }
  }
  return loss;
}

template <class T>
std::vector<T> Model<T>::next_byte_logits(std::span<const std::uint8_t> text) {
  const auto length = std::min<std::int64_t>(config_.context, static_cast<std::int64_t>(text.size()));
  Batch batch{1, length, {}, {}, {}};
  batch.inputs.assign(text.end() - length, text.end());
  forward_without_dropout(batch);
  const auto last = logits_.row(length - 1);
  return {last.begin(), last.end()};
}

// ---- backward ----

template <class T>
double Model<T>::forward_backward(const Batch& batch, std::uint64_t step) {
  forward(batch, config_.dropout, step);
  // logits become their gradient: (softmax - one-hot) / tokens.
  const Eigen::Index tokens = logits_.rows();
  Column losses(tokens);
  for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
    for (std::int64_t t = begin; t < begin + count; ++t) {
      auto row = logits_.row(t).array();
      const T of_target = row(batch.targets[t]);
      const T highest = row.maxCoeff();
      row = (row - highest).exp();
      const T sum = row.sum();
      losses(t) = std::log(sum) + highest - of_target;
      row *= T(1) / (sum * T(tokens));
      row(batch.targets[t]) -= T(1) / T(tokens);
    }
  });
  backward(batch, step);
  return static_cast<double>(losses.mean());
}

template <class T>
void Model<T>::backward(const Batch& batch, std::uint64_t step) {
  const AttentionShape shape = shape_of(batch);
  const std::int64_t tokens = shape.tokens();
  const std::int64_t width = config_.width;
  std::fill(gradients_.begin(), gradients_.end(), T(0));
  grad_stream_.setZero(tokens, width);
  grad_after_mlp_.resize(tokens, width);
  grad_raised_.resize(tokens, 4 * width);
  grad_mixed_.resize(tokens, width);
  grad_qkv_.resize(tokens, 3 * width);

  const Map head = weights(head_);
  for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
    const Matrix grad_normed = logits_.middleRows(begin, count) * head.transpose();
    add_normalize_gradient(grad_normed, normed_out_.middleRows(begin, count), inverse_out_.segment(begin, count),
                           grad_stream_.middleRows(begin, count));
  });
  transposed_product(normed_out_, logits_, gradient(head_));

  for (std::size_t n = layers_.size(); n-- > 0;) {
    Layer& layer = layers_[n];
    const Map out = weights(layer.out);
    const Map up = weights(layer.up);
    const Map down = weights(layer.down);
    for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
      auto grad = grad_stream_.middleRows(begin, count);
      grad_after_mlp_.middleRows(begin, count) = grad;
      auto grad_raised = grad_raised_.middleRows(begin, count);
      grad_raised.noalias() = grad * down.transpose();
      multiply_by_gelu_derivative(layer.raised.middleRows(begin, count), grad_raised);
      const Matrix grad_normed = grad_raised * up.transpose();
      add_normalize_gradient(grad_normed, layer.normed_mid.middleRows(begin, count),
                             layer.inverse_mid.segment(begin, count), grad);
      grad_mixed_.middleRows(begin, count).noalias() = grad * out.transpose();
    });
    transposed_product(layer.activated, grad_after_mlp_, gradient(layer.down));
    transposed_product(layer.normed_mid, grad_raised_, gradient(layer.up));
    transposed_product(layer.mixed, grad_stream_, gradient(layer.out));
    {
      const Stopwatch stopwatch(attention_seconds_);
      layer.attention.backward(shape, layer.qkv_rows.data(), layer.mixed.data(), grad_mixed_.data(),
                               dropout_of(config_.dropout, step, n), grad_qkv_.data(), gradient(layer.bias).data(),
                               scratch_);
    }
    const Map qkv = weights(layer.qkv);
    for_chunks(tokens, [&](std::int64_t begin, std::int64_t count) {
      const Matrix grad_normed = grad_qkv_.middleRows(begin, count) * qkv.transpose();
      add_normalize_gradient(grad_normed, layer.normed_in.middleRows(begin, count),
                             layer.inverse_in.segment(begin, count), grad_stream_.middleRows(begin, count));
    });
    transposed_product(layer.normed_in, grad_qkv_, gradient(layer.qkv));
  }
  Map grad_embedding = gradient(embedding_);
  for (std::int64_t t = 0; t < tokens; ++t) {
    grad_embedding.row(batch.inputs[t]) += grad_stream_.row(t);
  }
}

template class Model<float>;
template class Model<double>;

}  // namespace train_lm
