// SPDX-License-Identifier: Apache-2.0
//
// A decoder-only transformer over bytes, with every gradient written out:
//
//     x = embedding[byte]
//     for each layer:   x += attention(norm(x) Wqkv) Wo        causal, with dropout and a relative-position bias
//                       x += gelu(norm(x) Wup) Wdown
//     logits = norm(x) Whead                                   norm: root mean square, without a gain
//
// There are no position embeddings: where a byte stands is told by the bias alone. All parameters lie in one array,
// their gradients in another of the same shape, so that an optimizer sees only numbers. T is float, or double for
// the check of the gradients.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention_layer.h"
#include "data.h"

namespace train_lm {

struct ModelConfig {
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 128;
  std::int64_t context = 256;
  double dropout = 0.1;  // of the attention's probabilities
  AttentionKind attention = AttentionKind::kFovea;
  std::uint64_t seed = 1;
};

// A matrix, or a table, within the array of parameters.
struct Parameter {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool is_matrix = false;  // a linear map within the network; not a table, not what bytes go in and out by
  std::int64_t parts = 1;  // maps of the same input that lie side by side

  std::int64_t size() const { return rows * columns; }
};

struct HeldOutLoss {
  double nats = 0;  // a sum
  std::int64_t bytes = 0;
};

template <class T>
class Model {
 public:
  explicit Model(const ModelConfig& config);

  // The mean loss of a batch in nats a byte; gradients() are those of it. `step` picks the dropout.
  double forward_backward(const Batch& batch, std::uint64_t step);
  // Without dropout and gradients.
  HeldOutLoss evaluate(const Batch& batch);
  // The scores of the byte after `text`, of which the last `context` bytes are read.
  std::vector<T> next_byte_logits(std::span<const std::uint8_t> text);

  const ModelConfig& config() const { return config_; }
  const std::vector<Parameter>& layout() const { return layout_; }
  std::vector<T>& parameters() { return parameters_; }
  const std::vector<T>& gradients() const { return gradients_; }
  // Of all forward_backward() calls together.
  double seconds_of_attention() const { return attention_seconds_; }
  // What of that went into masks that naive attention has made for it.
  double seconds_of_masks() const { return scratch_.mask_seconds; }

 private:
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Column = Eigen::Matrix<T, Eigen::Dynamic, 1>;
  using Map = Eigen::Map<Matrix>;

  struct Layer {
    Parameter qkv, bias, out, up, down;
    AttentionLayer<T> attention;
    // What the backward needs of the forward, a row a token.
    Matrix normed_in, qkv_rows, mixed, normed_mid, raised, activated;
    Column inverse_in, inverse_mid;
  };

  Parameter add(const std::string& name, std::int64_t rows, std::int64_t columns, bool is_matrix,
                std::int64_t parts = 1);
  void initialize();
  Map weights(const Parameter& p) { return {parameters_.data() + p.offset, p.rows, p.columns}; }
  Map gradient(const Parameter& p) { return {gradients_.data() + p.offset, p.rows, p.columns}; }
  void forward(const Batch& batch, double dropout, std::uint64_t step);
  void forward_without_dropout(const Batch& batch);
  void backward(const Batch& batch, std::uint64_t step);
  AttentionShape shape_of(const Batch& batch) const;
  AttentionDropout dropout_of(double p, std::uint64_t step, std::size_t layer) const;

  ModelConfig config_;
  std::vector<Parameter> layout_;
  std::vector<T> parameters_;
  std::vector<T> gradients_;
  Parameter embedding_, head_;
  std::vector<Layer> layers_;
  AttentionScratch<T> scratch_;
  Matrix stream_, normed_out_, logits_;  // after the forward
  Column inverse_out_;
  Matrix grad_stream_, grad_after_mlp_, grad_raised_, grad_mixed_, grad_qkv_;
  double attention_seconds_ = 0;
};

extern template class Model<float>;
extern template class Model<double>;

}  // namespace train_lm
