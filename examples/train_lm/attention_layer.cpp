// SPDX-License-Identifier: Apache-2.0
#include "attention_layer.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "stopwatch.h"

namespace train_lm {

std::string_view name_of(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::kFovea:
      return "fovea";
    case AttentionKind::kNaive:
      return "naive";
    case AttentionKind::kNone:
      return "none";
  }
  return "";
}

// ---- the relative bias ----

template <class T>
RelativeBias<T>::RelativeBias(std::int64_t heads, std::int64_t context)
    : heads_(heads), context_(context), mirrored_(heads * (2 * context - 1), T(0)) {}

template <class T>
void RelativeBias<T>::set(const T* table) {
  for (std::int64_t h = 0; h < heads_; ++h) {
    std::reverse_copy(table + h * context_, table + (h + 1) * context_, mirrored_.data() + h * head_stride());
  }
}

template <class T>
void RelativeBias<T>::fold(const T* grad_bias, std::int64_t length, T* grad_table) const {
  parallel_for(heads_, [&](std::int64_t h) {
    T* distances = grad_table + h * context_;
    for (std::int64_t i = 0; i < length; ++i) {
      const T* row = grad_bias + (h * length + i) * length;
      for (std::int64_t j = 0; j <= i; ++j) {
        distances[i - j] += row[j];
      }
    }
  });
}

// ---- the layer ----

template <class T>
void AttentionLayer<T>::forward(const AttentionShape& shape, const T* qkv, const T* table,
                                const AttentionDropout& dropout, T* out, AttentionScratch<T>& scratch) {
  bias_.set(table);
  switch (kind_) {
    case AttentionKind::kFovea:
      return forward_fovea(shape, qkv, dropout, out, scratch);
    case AttentionKind::kNaive:
      return forward_naive(shape, qkv, dropout, out, scratch);
    case AttentionKind::kNone:
      std::fill_n(out, shape.tokens() * shape.width(), T(0));
  }
}

template <class T>
void AttentionLayer<T>::backward(const AttentionShape& shape, const T* qkv, const T* out, const T* grad_out,
                                 const AttentionDropout& dropout, T* grad_qkv, T* grad_table,
                                 AttentionScratch<T>& scratch) {
  if (kind_ == AttentionKind::kNone) {
    std::fill_n(grad_qkv, shape.tokens() * shape.width() * 3, T(0));
    return;
  }
  scratch.grad_bias.resize(shape.heads * shape.length * shape.length);
  if (kind_ == AttentionKind::kFovea) {
    backward_fovea(shape, qkv, out, grad_out, dropout, grad_qkv, scratch);
  } else {
    backward_naive(shape, qkv, grad_out, grad_qkv, scratch);
  }
  bias_.fold(scratch.grad_bias.data(), shape.length, grad_table);
}

// ---- through the library ----

namespace {

// q, k or v (part 0, 1, 2) of a product of shape (B, S, 3, H, D), or the gradient of one.
template <class View, class Pointer>
View part_of(const AttentionShape& s, Pointer qkv, int part) {
  const std::int64_t row = 3 * s.width();
  return {qkv + part * s.width(), {s.batch, s.length, s.heads, s.head_dim}, {s.length * row, row, s.head_dim, 1}};
}

template <class T>
fovea::Options options_of(const AttentionShape& s, const RelativeBias<T>& relative, const AttentionDropout& dropout) {
  fovea::Options options;
  options.causal = true;
  options.bias = {relative.origin(), {1, s.heads, s.length, s.length}, {0, relative.head_stride(), -1, 1}};
  options.dropout_p = dropout.p;
  options.seed = dropout.seed;
  options.offset = dropout.offset;
  return options;
}

}  // namespace

template <class T>
void AttentionLayer<T>::forward_fovea(const AttentionShape& shape, const T* qkv, const AttentionDropout& dropout,
                                      T* out, AttentionScratch<T>& scratch) {
  lse_.resize(shape.batch * shape.heads * shape.length);
  fovea::forward(part_of<fovea::Tensor>(shape, qkv, 0), part_of<fovea::Tensor>(shape, qkv, 1),
                 part_of<fovea::Tensor>(shape, qkv, 2),
                 fovea::MutableTensor(out, {shape.batch, shape.length, shape.heads, shape.head_dim}),
                 fovea::MutableTensor(lse_.data(), {shape.batch, shape.heads, shape.length}),
                 options_of(shape, bias_, dropout), &scratch.workspace);
}

template <class T>
void AttentionLayer<T>::backward_fovea(const AttentionShape& shape, const T* qkv, const T* out, const T* grad_out,
                                       const AttentionDropout& dropout, T* grad_qkv, AttentionScratch<T>& scratch) {
  const fovea::Tensor::Dims rows = {shape.batch, shape.length, shape.heads, shape.head_dim};
  fovea::Gradients gradients;
  gradients.q = part_of<fovea::MutableTensor>(shape, grad_qkv, 0);
  gradients.k = part_of<fovea::MutableTensor>(shape, grad_qkv, 1);
  gradients.v = part_of<fovea::MutableTensor>(shape, grad_qkv, 2);
  gradients.bias = {scratch.grad_bias.data(), {1, shape.heads, shape.length, shape.length}};
  fovea::backward(fovea::Tensor(grad_out, rows), part_of<fovea::Tensor>(shape, qkv, 0),
                  part_of<fovea::Tensor>(shape, qkv, 1), part_of<fovea::Tensor>(shape, qkv, 2),
                  fovea::Tensor(out, rows), fovea::Tensor(lse_.data(), {shape.batch, shape.heads, shape.length}),
                  gradients, options_of(shape, bias_, dropout), {}, &scratch.workspace);
}

// ---- the textbook ----

namespace {

template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using HeadView = Eigen::Map<const RowMajor<T>, 0, Eigen::OuterStride<>>;
template <class T>
using MutableHeadView = Eigen::Map<RowMajor<T>, 0, Eigen::OuterStride<>>;

using Bytes = Eigen::Array<std::uint8_t, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// 1 / (1 - p), of the p that is in force: the multiple of 2^-16 next to the one given.
template <class T>
T kept_factor(double p) {
  return static_cast<T>(1 / (1 - std::floor(p * 65536 + 0.5) / 65536));
}

// q, k or v of one batch entry and head: (S, D).
template <class T>
HeadView<T> head_of(const AttentionShape& s, const T* qkv, int part, std::int64_t b, std::int64_t h) {
  const std::int64_t row = 3 * s.width();
  return {qkv + b * s.length * row + part * s.width() + h * s.head_dim, s.length, s.head_dim,
          Eigen::OuterStride<>(row)};
}

}  // namespace

template <class T>
void AttentionLayer<T>::forward_naive(const AttentionShape& shape, const T* qkv, const AttentionDropout& dropout,
                                      T* out, AttentionScratch<T>& scratch) {
  const std::int64_t length = shape.length;
  probabilities_.resize(shape.batch * shape.heads * length * length);
  dropped_.resize(probabilities_.size());
  const T scale = T(1) / std::sqrt(static_cast<T>(shape.head_dim));
  std::vector<std::uint8_t> mask;
  if (dropout.p > 0) {  // the library's, so that both ways train the very same network
    const Stopwatch stopwatch(scratch.mask_seconds);
    mask = fovea::dropout_mask(shape.batch, shape.heads, length, length, dropout.p, dropout.seed, dropout.offset);
  }
  parallel_for(shape.batch * shape.heads, [&](std::int64_t n) {
    const std::int64_t b = n / shape.heads;
    const std::int64_t h = n % shape.heads;
    Eigen::Map<RowMajor<T>> p(probabilities_.data() + n * length * length, length, length);
    Eigen::Map<RowMajor<T>> kept(dropped_.data() + n * length * length, length, length);
    p.noalias() = head_of(shape, qkv, 0, b, h) * head_of(shape, qkv, 1, b, h).transpose();
    for (std::int64_t i = 0; i < length; ++i) {
      auto row = p.row(i).head(i + 1).array();
      const Eigen::Map<const Eigen::Array<T, 1, Eigen::Dynamic>> bias(bias_.origin() + h * bias_.head_stride() - i,
                                                                      i + 1);
      row = row * scale + bias;
      row = (row - row.maxCoeff()).exp();
      row /= row.sum();
      p.row(i).tail(length - i - 1).setZero();
    }
    kept = p;
    if (dropout.p > 0) {
      const Eigen::Map<const Bytes> keep(mask.data() + n * length * length, length, length);
      kept.array() *= keep.cast<T>() * kept_factor<T>(dropout.p);
    }
    MutableHeadView<T> o(out + (b * length * shape.heads + h) * shape.head_dim, length, shape.head_dim,
                         Eigen::OuterStride<>(shape.width()));
    o.noalias() = kept * head_of(shape, qkv, 2, b, h);
  });
}

template <class T>
void AttentionLayer<T>::backward_naive(const AttentionShape& shape, const T* qkv, const T* grad_out, T* grad_qkv,
                                       AttentionScratch<T>& scratch) {
  const std::int64_t length = shape.length;
  const T scale = T(1) / std::sqrt(static_cast<T>(shape.head_dim));
  std::fill(scratch.grad_bias.begin(), scratch.grad_bias.end(), T(0));
  parallel_for(shape.heads, [&](std::int64_t h) {  // a head's batch entries share its bias
    RowMajor<T> ds(length, length);
    Eigen::Map<RowMajor<T>> d_bias(scratch.grad_bias.data() + h * length * length, length, length);
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      const std::int64_t n = b * shape.heads + h;
      const Eigen::Map<const RowMajor<T>> p(probabilities_.data() + n * length * length, length, length);
      const Eigen::Map<const RowMajor<T>> kept(dropped_.data() + n * length * length, length, length);
      const HeadView<T> d_o(grad_out + (b * length * shape.heads + h) * shape.head_dim, length, shape.head_dim,
                            Eigen::OuterStride<>(shape.width()));
      const auto grad_part = [&](int part) {
        const HeadView<T> view = head_of<T>(shape, grad_qkv, part, b, h);
        return MutableHeadView<T>(const_cast<T*>(view.data()), length, shape.head_dim,
                                  Eigen::OuterStride<>(view.outerStride()));
      };
      grad_part(2).noalias() = kept.transpose() * d_o;
      // p * dp, dropout included, is kept * (dO V^T); its sum along a row is delta.
      ds.noalias() = d_o * head_of(shape, qkv, 2, b, h).transpose();
      ds.array() *= kept.array();
      for (std::int64_t i = 0; i < length; ++i) {
        const T delta = ds.row(i).sum();
        ds.row(i) -= delta * p.row(i);
      }
      d_bias += ds;
      ds *= scale;
      grad_part(0).noalias() = ds * head_of(shape, qkv, 1, b, h);
      grad_part(1).noalias() = ds.transpose() * head_of(shape, qkv, 0, b, h);
    }
  });
}

template class RelativeBias<float>;
template class RelativeBias<double>;
template class AttentionLayer<float>;
template class AttentionLayer<double>;

}  // namespace train_lm
