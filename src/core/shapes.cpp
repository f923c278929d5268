// SPDX-License-Identifier: Apache-2.0
//
// Each tensor as include/fovea/c.h describes its shape. Lengths that the text form says are the only memory here:
// they are read, all else is not.
#include "core/shapes.h"

#include <algorithm>
#include <limits>

namespace fovea {
namespace {

// The text form can say lengths whose products go beyond 64 bits; they are left for validate() to refuse.
std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<std::int64_t>::max() : result;
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? std::numeric_limits<std::int64_t>::max() : result;
}

}  // namespace

const fovea_tensor* Shapes::add(DType type, const Ints& shape, const void* data) {
  fovea_tensor tensor{};
  tensor.size = sizeof(tensor);
  tensor.data = const_cast<void*>(data);
  tensor.dtype = static_cast<std::int32_t>(type);
  tensor.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  tensors_.push_back(tensor);
  return &tensors_.back();
}

Shapes::Ints Shapes::batch() const {
  return problem_.two_level ? Ints{problem_.batch1, problem_.batch2} : Ints{problem_.batch1};
}

const fovea_tensor* Shapes::rows(std::int64_t rows, std::int64_t heads, std::int64_t columns, bool one_of_three,
                                 bool wide) {
  const Problem& p = problem_;
  Ints shape = p.packed ? Ints{} : batch();
  shape.insert(shape.end(), {rows, heads, columns});
  add(wide ? DType::kFp32 : p.type, shape);
  fovea_tensor& tensor = tensors_.back();
  if (p.layout == Layout::kBshd || (p.layout == Layout::kQkv3 && !one_of_three)) {
    return &tensor;
  }
  std::int64_t head = columns;
  std::int64_t row = product(heads, columns);
  std::int64_t entry = product(rows, row);
  if (p.layout == Layout::kBhsd) {
    row = columns;
    head = product(rows, columns);
  } else if (p.layout == Layout::kQkv3) {
    row = sum(product(p.heads_q, p.head_dim), product(p.heads_k, sum(p.head_dim, p.head_dim_v)));
    entry = product(rows, row);
  } else {
    // Strides that no name says: a column's worth of padding behind each head.
    head = sum(columns, 1);
    row = product(heads, head);
    entry = product(rows, row);
  }
  tensor.flags = FOVEA_TENSOR_STRIDED;
  Ints strides = p.packed ? Ints{} : p.two_level ? Ints{product(p.batch2, entry), entry} : Ints{entry};
  strides.insert(strides.end(), {row, head, 1});
  std::copy(strides.begin(), strides.end(), tensor.stride);
  return &tensor;
}

const fovea_tensor* Shapes::plane(const PlaneTraits& traits, bool wide) {
  if (!traits) {
    return nullptr;
  }
  const Extents& has = traits.extents;
  Ints shape{has.batch1 ? problem_.batch1 : 1};
  if (problem_.two_level) {
    shape.push_back(has.batch2 ? problem_.batch2 : 1);
  }
  shape.insert(shape.end(),
               {has.head ? problem_.heads_q : 1, has.query ? problem_.seqlen_q : 1, has.key ? problem_.seqlen_k : 1});
  return add(wide ? DType::kFp32 : traits.type, shape);
}

const fovea_tensor* Shapes::cu_seqlens(const Ints& lengths) {
  const std::int64_t batch = problem_.batch();
  if (lengths.empty() && batch > 0) {
    return add(DType::kInt64, {sum(batch, 1)});
  }
  Ints boundaries{0};
  for (const std::int64_t length : lengths) {
    boundaries.push_back(boundaries.back() + length);
  }
  boundaries_.push_back(std::move(boundaries));
  return add(DType::kInt64, {batch + 1}, boundaries_.back().data());
}

const fovea_tensor* Shapes::seqused(const Ints& used) {
  used_.emplace_back(used.begin(), used.end());  // they fit: parse() and validate() see to it
  return add(DType::kInt32, {problem_.batch()}, used.empty() ? nullptr : used_.back().data());
}

const fovea_tensor* Shapes::positions(const Ints& values) {
  return add(DType::kInt64, {problem_.batch()}, values.empty() ? nullptr : values.data());
}

Shapes::Shapes(const Problem& problem) : problem_(problem) {
  const Problem& p = problem;
  given_.size = sizeof(given_);
  given_.flags = (p.causal ? FOVEA_CAUSAL : 0) | (p.deterministic ? FOVEA_DETERMINISTIC : 0) |
                 (p.scale ? FOVEA_SCALE : 0) | (p.clear_rows ? FOVEA_CLEAR_ROWS : 0) |
                 (p.positions ? FOVEA_POSITIONS : 0) | FOVEA_WINDOW;
  given_.align = p.top_left ? FOVEA_TOP_LEFT : FOVEA_BOTTOM_RIGHT;
  given_.rng = static_cast<std::int32_t>(p.rng);
  given_.device = p.device;
  given_.backend = p.backend.empty() ? nullptr : p.backend.c_str();
  given_.scale = p.scale.value_or(0);
  given_.window_left = p.window_left;
  given_.window_right = p.window_right;
  given_.position_q = p.position_q;
  given_.position_k = p.position_k;
  given_.softcap = p.softcap;
  given_.dropout_p = p.dropout;
  given_.seed = p.seed;
  given_.offset = p.offset;
  const auto bit = [](bool is_set, std::uint64_t value) { return is_set ? value : 0; };
  const Results& added = p.accumulate;
  given_.accumulate = bit(added.out, FOVEA_ACCUMULATE_OUT) | bit(added.q, FOVEA_ACCUMULATE_GRAD_Q) |
                      bit(added.k, FOVEA_ACCUMULATE_GRAD_K) | bit(added.v, FOVEA_ACCUMULATE_GRAD_V) |
                      bit(added.bias, FOVEA_ACCUMULATE_GRAD_BIAS) | bit(added.bias2, FOVEA_ACCUMULATE_GRAD_BIAS2) |
                      bit(added.sink, FOVEA_ACCUMULATE_GRAD_SINK);

  const std::int64_t rows_q = p.packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = p.packed ? p.total_k : p.seqlen_k;
  const auto q = [&](bool wide = false) { return rows(rows_q, p.heads_q, p.head_dim, true, wide); };
  const auto k = [&](bool wide = false) { return rows(rows_k, p.heads_k, p.head_dim, true, wide); };
  const auto v = [&](bool wide = false) { return rows(rows_k, p.heads_k, p.head_dim_v, true, wide); };
  const auto out = [&](bool wide = false) { return rows(rows_q, p.heads_q, p.head_dim_v, false, wide); };
  const DType sums = p.type == DType::kFp64 ? DType::kFp64 : DType::kFp32;
  const auto lse = [&] {
    Ints shape = p.packed ? Ints{} : batch();
    shape.insert(shape.end(), {p.heads_q, rows_q});
    return add(sums, shape);
  };
  const auto sink = [&] { return add(sums, {p.heads_q}); };

  given_.q = q();
  given_.k = k();
  given_.v = v();
  given_.bias = plane(p.bias);
  given_.bias2 = plane(p.bias2);
  given_.mask = plane(p.mask);
  if (p.alibi != Alibi::kNone) {
    given_.alibi_slopes = add(sums, p.alibi == Alibi::kPerHead ? Ints{p.heads_q} : Ints{p.batch(), p.heads_q});
  }
  given_.sink = p.sink ? sink() : nullptr;
  if (p.packed) {
    given_.cu_seqlens_q = cu_seqlens(p.lengths_q);
    given_.cu_seqlens_k = cu_seqlens(p.lengths_k);
    given_.max_seqlen_q = p.seqlen_q;
    given_.max_seqlen_k = p.seqlen_k;
    given_.batch_outer = p.two_level ? p.batch1 : 0;
  }
  given_.seqused_q = p.has_used_q ? seqused(p.used_q) : nullptr;
  given_.seqused_k = p.has_used_k ? seqused(p.used_k) : nullptr;
  given_.positions_q = p.has_positions_q ? positions(p.positions_q) : nullptr;
  given_.positions_k = p.has_positions_k ? positions(p.positions_k) : nullptr;
  if (p.streams) {
    const Extents& has = p.streams.extents;
    Ints shape{has.batch1 ? p.batch1 : 1};
    if (p.two_level) {
      shape.push_back(has.batch2 ? p.batch2 : 1);
    }
    shape.push_back(has.head ? p.heads_q : 1);
    given_.dropout_streams = add(DType::kInt64, shape);
  }

  const bool backward = p.direction == Direction::kBackward;
  given_.out = out(p.wide.out);
  given_.lse = backward || p.lse ? lse() : nullptr;
  if (backward) {
    given_.grad_out = out();
    given_.grad_lse = p.grad_lse ? lse() : nullptr;
    given_.grad_q = p.need.q ? q(p.wide.q) : nullptr;
    given_.grad_k = p.need.k ? k(p.wide.k) : nullptr;
    given_.grad_v = p.need.v ? v(p.wide.v) : nullptr;
    given_.grad_bias = p.need.bias ? plane(p.bias, p.wide.bias) : nullptr;
    given_.grad_bias2 = p.need.bias2 ? plane(p.bias2, p.wide.bias2) : nullptr;
    given_.grad_sink = p.need.sink ? sink() : nullptr;
  }
}

}  // namespace fovea
