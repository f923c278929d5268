// SPDX-License-Identifier: Apache-2.0
//
// What both programs of this folder compute: causal attention of one sequence, forward and backward, with dropout, once
// by one process and once by ranks, which have some rows each. The memory of the tensors is behind `Memory`.
#pragma once

#include <fovea/parallel.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace example {

struct Sizes {
  std::int64_t rows = 1000;  // of the sequence: no multiple of anything
  std::int64_t heads = 8, key_heads = 2, dim = 64;
};

// Tensors of one rank, or of one process, as vectors of the host.
struct Tensors {
  std::int64_t rows = 0;
  std::vector<float> q, k, v, grad_out, out, lse, grad_q, grad_k, grad_v;
};

// Row `row` of the sequence always has the same numbers, whichever process makes them.
inline std::vector<float> random_rows(const std::vector<std::int64_t>& index, std::int64_t elements, unsigned seed) {
  std::vector<float> numbers;
  for (const std::int64_t row : index) {
    std::mt19937 generator(seed * 1000003u + static_cast<unsigned>(row));
    std::normal_distribution<float> normal;
    for (std::int64_t n = 0; n < elements; ++n) {
      numbers.push_back(normal(generator));
    }
  }
  return numbers;
}

inline Tensors make(const Sizes& sizes, const std::vector<std::int64_t>& index) {
  Tensors t;
  t.rows = static_cast<std::int64_t>(index.size());
  t.q = random_rows(index, sizes.heads * sizes.dim, 1);
  t.k = random_rows(index, sizes.key_heads * sizes.dim, 2);
  t.v = random_rows(index, sizes.key_heads * sizes.dim, 3);
  t.grad_out = random_rows(index, sizes.heads * sizes.dim, 4);
  t.out.resize(t.q.size());
  t.lse.resize(static_cast<std::size_t>(sizes.heads * t.rows));
  t.grad_q.resize(t.q.size());
  t.grad_k.resize(t.k.size());
  t.grad_v.resize(t.v.size());
  return t;
}

// The numbers of a rank's rows, in the order in which they lie in its memory.
inline std::vector<std::int64_t> index_of(const fovea::parallel::Rows& rows, int rank) {
  std::vector<std::int64_t> index;
  for (const fovea::parallel::Piece& piece : rows.pieces(rank)) {
    for (std::int64_t row = 0; row < piece.rows; ++row) {
      index.push_back(rows.first(piece) + row);
    }
  }
  return index;
}

inline fovea::Options options() {
  fovea::Options options;
  options.causal = true;
  options.dropout_p = 0.1;  // the mask is that of one device
  options.seed = 42;        // equal on all ranks
  return options;
}

// The calls of tensors at these addresses, which may be a device's.
struct Addresses {
  void *q, *k, *v, *grad_out, *out, *lse, *grad_q, *grad_k, *grad_v;
};

inline Addresses addresses(Tensors& t) {
  return {t.q.data(),   t.k.data(),      t.v.data(),      t.grad_out.data(), t.out.data(),
          t.lse.data(), t.grad_q.data(), t.grad_k.data(), t.grad_v.data()};
}

inline fovea::MutableTensor of(void* data, const fovea::Tensor::Dims& shape) { return {data, FOVEA_FP32, shape}; }

inline fovea::Forward forward(const Sizes& s, std::int64_t rows, const Addresses& a, const fovea::Options& options) {
  const fovea::Tensor::Dims q{1, rows, s.heads, s.dim}, k{1, rows, s.key_heads, s.dim};
  return {of(a.q, q), of(a.k, k), of(a.v, k), of(a.out, q), of(a.lse, {1, s.heads, rows}), options};
}

inline fovea::Backward backward(const Sizes& s, std::int64_t rows, const Addresses& a, const fovea::Options& options) {
  const fovea::Tensor::Dims q{1, rows, s.heads, s.dim}, k{1, rows, s.key_heads, s.dim};
  fovea::Gradients grads;
  grads.q = of(a.grad_q, q);
  grads.k = of(a.grad_k, k);
  grads.v = of(a.grad_v, k);
  return {of(a.grad_out, q),
          of(a.q, q),
          of(a.k, k),
          of(a.v, k),
          of(a.out, q),
          of(a.lse, {1, s.heads, rows}),
          grads,
          options};
}

// Compares a rank's results with the same rows of one process's: `elements` of each row, and the number that differ.
// Returns whether they are as they should be: equal bits, or a relative error of at most `error`.
inline bool same(const char* name, const std::vector<float>& mine, const std::vector<float>& alone,
                 const std::vector<std::int64_t>& index, double error, int rank) {
  const std::size_t elements = index.empty() ? 0 : mine.size() / index.size();
  double difference = 0, size = 1e-30;
  std::size_t bits = 0;
  for (std::size_t row = 0; row < index.size(); ++row) {
    for (std::size_t n = 0; n < elements; ++n) {
      const float a = mine[row * elements + n], b = alone[static_cast<std::size_t>(index[row]) * elements + n];
      bits += std::memcmp(&a, &b, sizeof(float)) != 0;
      difference += (double(a) - b) * (double(a) - b);
      size += double(b) * b;
    }
  }
  const double found = std::sqrt(difference / size);
  const bool computed = size > 1e-20 || index.empty();  // and not all 0
  const bool right = computed && (error == 0 ? bits == 0 : found <= error);
  std::printf("rank %d  %-7s %7zu of %7zu elements have other bits, relative difference %.1e: %s\n", rank, name, bits,
              mine.size(), found, right ? "right" : "WRONG");
  return right;
}

// A process's own results, to be compared with the rows of `alone`. On a CPU out, lse and grad_q have the same bits
// (error is 0), but for pieces of a few rows; gradients of keys are sums over the ranks.
inline bool right(const Sizes& sizes, const Tensors& mine, const Tensors& alone, const std::vector<std::int64_t>& index,
                  double error, int rank) {
  const double of_sums = std::max(error, 2e-6);
  bool right = same("out", mine.out, alone.out, index, error, rank);
  right = same("grad_q", mine.grad_q, alone.grad_q, index, error, rank) && right;
  right = same("grad_k", mine.grad_k, alone.grad_k, index, of_sums, rank) && right;
  right = same("grad_v", mine.grad_v, alone.grad_v, index, of_sums, rank) && right;
  std::vector<float> lse, lse_alone;  // rows first, as same() has them
  for (std::int64_t row = 0; row < mine.rows; ++row) {
    for (std::int64_t head = 0; head < sizes.heads; ++head) {
      lse.push_back(mine.lse[static_cast<std::size_t>(head * mine.rows + row)]);
    }
  }
  for (std::int64_t row = 0; row < alone.rows; ++row) {
    for (std::int64_t head = 0; head < sizes.heads; ++head) {
      lse_alone.push_back(alone.lse[static_cast<std::size_t>(head * alone.rows + row)]);
    }
  }
  return same("lse", lse, lse_alone, index, error, rank) && right;
}

}  // namespace example
