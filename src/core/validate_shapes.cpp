// SPDX-License-Identifier: Apache-2.0
//
// Shapes and lengths: q fixes batch, heads and lengths, k and v follow, cu_seqlens make it packed. The name of how they
// lie in memory.
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "core/validator.h"

namespace fovea {

// ---- shapes ----

void Validator::shapes() {
  const fovea_tensor& q = *given_.q;
  const fovea_tensor& k = required("k", given_.k, "a tensor, (B, Sk, Hk, D) or (total_k, Hk, D)");
  const fovea_tensor& v = required("v", given_.v, "a tensor, (B, Sk, Hk, Dv) or (total_k, Hk, Dv)");
  type_of("k", k, {problem_.type}, ", the type of q");
  type_of("v", v, {problem_.type}, ", the type of q");

  if ((given_.cu_seqlens_q == nullptr) != (given_.cu_seqlens_k == nullptr)) {
    const bool q_only = given_.cu_seqlens_q != nullptr;
    refuse("cu_seqlens_{}: not given beside cu_seqlens_{}; accepted: both, or neither", q_only ? 'k' : 'q',
           q_only ? 'q' : 'k');
  }
  problem_.packed = given_.cu_seqlens_q != nullptr;
  const int rank = problem_.packed ? 3 : q.rank;
  if (problem_.packed && q.rank != 3) {
    refuse("q: shape {}; accepted with cu_seqlens_q: (total_q, Hq, D)", shape_of(q));
  }
  if (rank < 4 && !problem_.packed) {
    refuse(
        "q: shape {}; accepted: (B, Sq, Hq, D), (B1, B2, Sq, Hq, D), or with cu_seqlens_q and cu_seqlens_k "
        "(total_q, Hq, D)",
        shape_of(q));
  }
  if (k.rank != rank) {
    refuse("k: shape {}; accepted: the rank of q, {}", shape_of(k), rank);
  }
  if (v.rank != rank) {
    refuse("v: shape {}; accepted: the rank of q, {}", shape_of(v), rank);
  }

  problem_.heads_q = q.shape[rank - 2];
  problem_.heads_k = k.shape[rank - 2];
  problem_.head_dim = q.shape[rank - 1];
  problem_.head_dim_v = v.shape[rank - 1];
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("v", &v)}) {
    if (tensor->shape[rank - 2] > kMostHeads || tensor->shape[rank - 1] > kMostHeads) {
      refuse("{}: shape {}; accepted: at most 2^32 heads, head_dim at most 2^32", name, shape_of(*tensor));
    }
  }
  if (k.shape[rank - 1] != problem_.head_dim) {
    refuse("k: shape {}, head_dim {}; accepted: that of q, {}", shape_of(k), k.shape[rank - 1], problem_.head_dim);
  }
  if (problem_.heads_q > 0 && (problem_.heads_k == 0 || problem_.heads_q % problem_.heads_k != 0)) {
    refuse("k: shape {}, {} heads; accepted: a divisor of q's {} heads", shape_of(k), problem_.heads_k,
           problem_.heads_q);
  }
  if (problem_.packed) {
    packed_batch();
  } else {
    dense_batch();
  }
  Dims values(k.shape, k.shape + rank - 1);
  values.push_back(problem_.head_dim_v);
  shape_is("v", v, values, problem_.packed ? "(total_k, Hk, Dv)" : "(B, Sk, Hk, Dv)");
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    storage(name, *tensor);
  }

  math::Rows& rows = call_.rows;
  rows.batch1 = problem_.batch1;
  rows.batch2 = problem_.batch2;
  rows.heads_q = problem_.heads_q;
  rows.heads_k = problem_.heads_k;
  rows.rows_q = q.shape[rank - 3];
  rows.rows_k = k.shape[rank - 3];
  call_.q = rows_view(q);
  call_.k = rows_view(k);
  call_.v = rows_view(v);
}

void Validator::dense_batch() {
  const fovea_tensor& q = *given_.q;
  const fovea_tensor& k = *given_.k;
  problem_.two_level = q.rank == 5;
  problem_.batch1 = q.shape[0];
  problem_.batch2 = problem_.two_level ? q.shape[1] : 1;
  problem_.seqlen_q = q.shape[q.rank - 3];
  problem_.seqlen_k = k.shape[k.rank - 3];
  if (!std::equal(q.shape, q.shape + q.rank - 3, k.shape)) {
    refuse("k: shape {}; accepted: the batch of q, {} (where entries share k, broadcast it to that, with strides of 0)",
           shape_of(k), text_of(q.shape, q.rank - 3));
  }
  for (const auto& [name, value] :
       {std::pair("max_seqlen_q", given_.max_seqlen_q), std::pair("max_seqlen_k", given_.max_seqlen_k),
        std::pair("batch_outer", given_.batch_outer)}) {
    if (value != 0) {
      refuse("{}: {} without cu_seqlens; accepted: none (0 in C), the shape of q says it", name, value);
    }
  }
}

void Validator::packed_batch() {
  std::int64_t batch = 0;
  for (const auto& [name, tensor] :
       {std::pair("cu_seqlens_q", given_.cu_seqlens_q), std::pair("cu_seqlens_k", given_.cu_seqlens_k)}) {
    type_of(name, *tensor, {DType::kInt32, DType::kInt64});
    if (tensor->rank != 1 || tensor->shape[0] < 1) {
      refuse("{}: shape {}; accepted: (B + 1)", name, shape_of(*tensor));
    }
    storage(name, *tensor);
    if (tensor == given_.cu_seqlens_q) {
      batch = tensor->shape[0] - 1;
    } else if (tensor->shape[0] - 1 != batch) {
      refuse("{}: shape {}; accepted: that of cu_seqlens_q, {}", name, shape_of(*tensor),
             shape_of(*given_.cu_seqlens_q));
    }
  }
  problem_.total_q = given_.q->shape[0];
  problem_.total_k = given_.k->shape[0];
  problem_.batch1 = batch;
  if (given_.batch_outer < 0 || (given_.batch_outer > 0 && batch % given_.batch_outer != 0)) {
    refuse("batch_outer: {}; accepted: a divisor of the batch, {}, or 0 (one level)", given_.batch_outer, batch);
  }
  if (given_.batch_outer > 0) {
    problem_.two_level = true;
    problem_.batch1 = given_.batch_outer;
    problem_.batch2 = batch / given_.batch_outer;
  }
}

// q, k, v, out and their gradients.
View Validator::rows_view(const fovea_tensor& tensor) const {
  const auto s = strides_of(tensor);
  View view{tensor.data, static_cast<DType>(tensor.dtype), {}};
  if (problem_.packed) {
    view.strides = {0, 0, s[1], s[0], s[2]};
  } else if (problem_.two_level) {
    view.strides = {s[0], s[1], s[3], s[2], s[4]};
  } else {
    view.strides = {s[0], 0, s[2], s[1], s[3]};
  }
  return view;
}

// ---- lengths ----

// Where they can be read, they are read once: what is checked is then what is computed with.
math::Lengths Validator::lengths_view(const fovea_tensor& tensor) {
  const math::Lengths given{tensor.data, tensor.dtype == FOVEA_INT64, strides_of(tensor)[0]};
  if (!given || !readable()) {
    return given;
  }
  Ints copy(static_cast<std::size_t>(tensor.shape[0]));
  for (std::size_t n = 0; n < copy.size(); ++n) {
    copy[n] = given[static_cast<std::int64_t>(n)];
  }
  copy.reserve(1);  // lengths are given where there is an address, also of a batch of none
  call_.lengths.push_back(std::make_shared<const Ints>(std::move(copy)));
  return {call_.lengths.back()->data(), true, 1};
}

void Validator::lengths() {
  math::Rows& rows = call_.rows;
  if (problem_.packed) {
    rows.cu_q = lengths_view(*given_.cu_seqlens_q);
    rows.cu_k = lengths_view(*given_.cu_seqlens_k);
    problem_.lengths_q = cu_seqlens("cu_seqlens_q", rows.cu_q, "total_q", problem_.total_q);
    problem_.lengths_k = cu_seqlens("cu_seqlens_k", rows.cu_k, "total_k", problem_.total_k);
    rows.is_packed = true;
  }
  problem_.has_used_q = given_.seqused_q != nullptr;
  problem_.has_used_k = given_.seqused_k != nullptr;
  if (problem_.has_used_q) {
    rows.used_q = seqused("seqused_q", *given_.seqused_q, problem_.lengths_q, problem_.seqlen_q, problem_.used_q);
  }
  if (problem_.has_used_k) {
    rows.used_k = seqused("seqused_k", *given_.seqused_k, problem_.lengths_k, problem_.seqlen_k, problem_.used_k);
  }
  if (problem_.packed) {
    const char* of_q = problem_.has_used_q ? "seqused_q" : "cu_seqlens_q";
    const char* of_k = problem_.has_used_k ? "seqused_k" : "cu_seqlens_k";
    problem_.seqlen_q = longest("max_seqlen_q", given_.max_seqlen_q, of_q, problem_.total_q, rows.cu_q,
                                problem_.lengths_q, problem_.used_q);
    problem_.seqlen_k = longest("max_seqlen_k", given_.max_seqlen_k, of_k, problem_.total_k, rows.cu_k,
                                problem_.lengths_k, problem_.used_k);
  }
  // max_seqlen may be any number from the longest sequence up: no sequence is longer than what holds them all.
  rows.limit_q = std::min(problem_.seqlen_q, rows.rows_q);
  rows.limit_k = std::min(problem_.seqlen_k, rows.rows_k);
  if (problem_.dropout > 0) {
    constexpr std::int64_t kMostWithDropout = std::int64_t{1} << 32;
    for (const auto& [name, length] : {std::pair('q', rows.limit_q), std::pair('k', rows.limit_k)}) {
      if (length > kMostWithDropout) {
        refuse("{}: sequences of up to {}; accepted with dropout: at most 2^32", name, length);
      }
    }
  }
}

Ints Validator::cu_seqlens(const char* name, const math::Lengths& cu, const char* total_name,
                           std::int64_t total) const {
  Ints lengths;
  if (!cu || !readable()) {
    return lengths;
  }
  lengths.reserve(static_cast<std::size_t>(problem_.batch()));
  if (cu[0] != 0) {
    refuse("{}: begins with {}; accepted: 0 first", name, cu[0]);
  }
  for (std::int64_t b = 0; b < problem_.batch(); ++b) {
    if (cu[b + 1] < cu[b]) {
      refuse("{}: {} at index {} after {}; accepted: numbers that never decrease", name, cu[b + 1], b + 1, cu[b]);
    }
    if (cu[b + 1] > total) {
      refuse("{}: {} at index {}; accepted: at most {}, {}", name, cu[b + 1], b + 1, total_name, total);
    }
    lengths.push_back(cu[b + 1] - cu[b]);
  }
  return lengths;
}

// Where rows are used in part, the longest used part is enough, which is what callers with a cache know. Where there
// are no rows at all, nothing is longer than 0.
std::int64_t Validator::longest(const char* name, std::int64_t given, const char* of, std::int64_t total,
                                const math::Lengths& cu, const Ints& lengths, const Ints& used) const {
  if (given < 0) {
    refuse("{}: {}; accepted: at least the longest sequence", name, given);
  }
  const auto most = [](const Ints& n) { return n.empty() ? 0 : *std::max_element(n.begin(), n.end()); };
  const std::int64_t length = given != 0 ? given : most(lengths);
  const std::int64_t found = most(used.empty() ? lengths : used);
  if (length == 0 && total > 0 && (!cu || !readable()) && problem_.batch() > 0) {
    refuse("{}: 0; accepted: at least the longest sequence, as {} cannot be read here", name, of);
  }
  if (length < found) {
    refuse("{}: {}; accepted: at least the longest sequence of {}, {}", name, given, of, found);
  }
  const std::int64_t heads = std::max(problem_.heads_q, problem_.heads_k);
  const std::int64_t columns = std::max(problem_.head_dim, problem_.head_dim_v);
  if (!product_fits(Dims{problem_.batch(), heads, length}) || !product_fits(Dims{heads, length, columns})) {
    refuse("{}: {}; accepted: at most 2^50 rows in {} sequences of {} heads, 2^50 elements in one", name, length,
           problem_.batch(), heads);
  }
  return length;
}

math::Lengths Validator::seqused(const char* name, const fovea_tensor& tensor, const Ints& lengths,
                                 std::int64_t longest, Ints& values) {
  type_of(name, tensor, {DType::kInt32});
  shape_is(name, tensor, {problem_.batch()}, "(B)");
  storage(name, tensor);
  const math::Lengths used = lengths_view(tensor);
  if (used && readable()) {
    values.reserve(static_cast<std::size_t>(problem_.batch()));
    for (std::int64_t b = 0; b < problem_.batch(); ++b) {
      const std::int64_t most = lengths.empty() ? longest : lengths[static_cast<std::size_t>(b)];
      if (used[b] < 0 || used[b] > most) {
        refuse("{}: {} at index {}; accepted: 0 to the length of that sequence, {}", name, used[b], b, most);
      }
      values.push_back(used[b]);
    }
  }
  return used;
}

// ---- layout ----

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

// Only a name for what the strides say: nothing is decided by it.
Layout Validator::layout() const {
  const std::int64_t row_of_three =
      problem_.heads_q * problem_.head_dim + problem_.heads_k * (problem_.head_dim + problem_.head_dim_v);
  bool rows_first = true;
  bool heads_first = true;
  bool one_tensor = given_.q->shape[given_.q->rank - 3] == given_.k->shape[given_.k->rank - 3];
  for (const fovea_tensor* tensor : {given_.q, given_.k, given_.v}) {
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
