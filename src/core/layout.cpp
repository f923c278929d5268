// SPDX-License-Identifier: Apache-2.0
#include "core/layout.h"

#include <algorithm>
#include <initializer_list>

#include "core/given.h"

namespace fovea {
namespace {

bool strides_are(const fovea_tensor& tensor, std::initializer_list<std::int64_t> accepted) {
  const auto strides = strides_of(tensor);
  int i = 0;
  for (const std::int64_t stride : accepted) {
    if (tensor.shape[i] > 1 && strides[i] != stride) {
      return false;
    }
    ++i;
  }
  return true;
}

// For strides of (batch levels, rows, heads, columns) that are `row` and `head` apart.
bool lies(const fovea_tensor& tensor, std::int64_t row, std::int64_t head) {
  const int rank = tensor.rank;
  const std::int64_t block =
      std::max(row * tensor.shape[rank - 3], head * tensor.shape[rank - 2]);  // of one batch entry
  switch (rank) {
    case 3:
      return strides_are(tensor, {row, head, 1});
    case 4:
      return strides_are(tensor, {block, row, head, 1});
    default:
      return strides_are(tensor, {block * tensor.shape[1], block, row, head, 1});
  }
}

}  // namespace

Layout layout_of(const fovea_problem& given, const Problem& problem) {
  const std::int64_t row_of_three =
      problem.heads_q * problem.head_dim + problem.heads_k * (problem.head_dim + problem.head_dim_v);
  bool rows_first = true;
  bool heads_first = true;
  bool one_tensor = given.q->shape[given.q->rank - 3] == given.k->shape[given.k->rank - 3];
  for (const fovea_tensor* tensor : {given.q, given.k, given.v}) {
    const std::int64_t columns = tensor->shape[tensor->rank - 1];
    const std::int64_t heads = tensor->shape[tensor->rank - 2];
    const std::int64_t sequence = tensor->shape[tensor->rank - 3];
    rows_first = rows_first && lies(*tensor, heads * columns, columns);
    heads_first = heads_first && lies(*tensor, columns, sequence * columns);
    one_tensor = one_tensor && lies(*tensor, row_of_three, columns);
  }
  return rows_first ? Layout::kBshd : heads_first ? Layout::kBhsd : one_tensor ? Layout::kQkv3 : Layout::kStrided;
}

}  // namespace fovea
