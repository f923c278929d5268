// SPDX-License-Identifier: Apache-2.0
//
// The attention of one transformer layer, three ways behind one interface:
//
//     fovea   forward and backward through the library: no S x S matrix but the bias gradient's
//     naive   the textbook: S x S scores and probabilities for each batch entry and head, kept for the backward
//     none    an output of zeros: what the network is worth without attention
//
// q, k and v come as the one product of the layer's linear map, (B, S, 3, H, D), and their gradients leave the same
// way: views with strides, nothing is copied. Scores get a learnable bias that depends on the distance i - j alone.
#pragma once

#include <fovea/attention.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace train_lm {

enum class AttentionKind { kFovea, kNaive, kNone };

std::string_view name_of(AttentionKind kind);

struct AttentionShape {
  std::int64_t batch = 0;
  std::int64_t length = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;

  std::int64_t tokens() const { return batch * length; }
  std::int64_t width() const { return heads * head_dim; }
};

struct AttentionDropout {
  double p = 0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  // another one for each layer and step
};

// A bias b(h, i, j) = table(h, i - j), i >= j, of which no S x S copy is made: along a row of scores the table is
// read backwards, one element further on for each row, so a row stride of -1 and a column stride of +1 over one
// mirrored copy of the table are all it takes.
//
//     mirrored:  table[S-1] ... table[1] table[0] 0 0 ... 0       the zeros stand for j > i, which causal masks
//                                        ^ origin: (i, j) = (0, 0)
template <class T>
class RelativeBias {
 public:
  RelativeBias(std::int64_t heads, std::int64_t context);

  void set(const T* table);  // (heads, context)
  // Element (h, i, j) is origin()[h * head_stride() - i + j].
  const T* origin() const { return mirrored_.data() + context_ - 1; }
  std::int64_t head_stride() const { return 2 * context_ - 1; }
  std::int64_t context() const { return context_; }

  // Adds the gradient of the bias, (H, S, S), up along its diagonals into the gradient of the table.
  void fold(const T* grad_bias, std::int64_t length, T* grad_table) const;

 private:
  std::int64_t heads_;
  std::int64_t context_;
  std::vector<T> mirrored_;
};

// Memory that the layers use one after the other.
template <class T>
struct AttentionScratch {
  std::vector<T> grad_bias;    // (1, H, S, S)
  fovea::Workspace workspace;  // the library's
  double mask_seconds = 0;     // what naive attention has spent on having its dropout masks made
};

template <class T>
class AttentionLayer {
 public:
  AttentionLayer(AttentionKind kind, std::int64_t heads, std::int64_t context) : kind_(kind), bias_(heads, context) {}

  // out: (B, S, H, D). `table`: (H, context), the learnable bias.
  void forward(const AttentionShape& shape, const T* qkv, const T* table, const AttentionDropout& dropout, T* out,
               AttentionScratch<T>& scratch);

  // After forward() with the same arguments. Writes grad_qkv, adds to grad_table.
  void backward(const AttentionShape& shape, const T* qkv, const T* out, const T* grad_out,
                const AttentionDropout& dropout, T* grad_qkv, T* grad_table, AttentionScratch<T>& scratch);

 private:
  void forward_fovea(const AttentionShape& shape, const T* qkv, const AttentionDropout& dropout, T* out,
                     AttentionScratch<T>& scratch);
  void backward_fovea(const AttentionShape& shape, const T* qkv, const T* out, const T* grad_out,
                      const AttentionDropout& dropout, T* grad_qkv, AttentionScratch<T>& scratch);
  void forward_naive(const AttentionShape& shape, const T* qkv, const AttentionDropout& dropout, T* out,
                     AttentionScratch<T>& scratch);
  void backward_naive(const AttentionShape& shape, const T* qkv, const T* grad_out, T* grad_qkv,
                      AttentionScratch<T>& scratch);

  AttentionKind kind_;
  RelativeBias<T> bias_;
  std::vector<T> lse_;            // fovea keeps one number a row ...
  std::vector<T> probabilities_;  // ... the textbook two S x S matrices a head: before
  std::vector<T> dropped_;        // and after dropout, scaled by 1 / (1 - p)
};

}  // namespace train_lm
