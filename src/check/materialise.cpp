// SPDX-License-Identifier: Apache-2.0
//
// Tensors of a case: strides from layout and skew, and the list of elements that exist. fill.cpp has the numbers in
// them.
#include "check/materialise.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>

#include "check/numbers.h"
#include "core/element.h"
#include "core/given.h"

namespace fovea::check {
namespace {

// Calls f(index, element) for every index of the tensor, the last dimension fastest.
template <class F>
void for_each_index(const Tensor& tensor, F&& f) {
  const fovea_tensor& view = tensor.view;
  std::int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) {
    count *= view.shape[d];
  }
  Index index{};
  for (std::int64_t n = 0; n < count; ++n) {
    f(index, tensor.element(index));
    for (int d = view.rank - 1; d >= 0 && ++index[d] == view.shape[d]; --d) {
      index[d] = 0;
    }
  }
}

}  // namespace

std::int64_t Tensor::element(const Index& index) const {
  std::int64_t at = base;
  for (int d = 0; d < view.rank; ++d) {
    at += index[d] * view.stride[d];
  }
  return at;
}

double Tensor::get(std::int64_t element) const { return load(buffer->data(), type(), element); }

void Tensor::set(std::int64_t element, double value) const {
  if (type() == DType::kBool) {
    buffer->data()[element] = value != 0;
  } else {
    store(buffer->data(), type(), element, value);
  }
}

math::Sequence sequence_of(const Problem& p, std::int64_t b) {
  math::Sequence s{0, p.seqlen_q, 0, p.seqlen_k};
  if (p.packed) {
    s = {0, p.lengths_q[b], 0, p.lengths_k[b]};
    for (std::int64_t before = 0; before < b; ++before) {
      s.q_begin += p.lengths_q[before];
      s.k_begin += p.lengths_k[before];
    }
  }
  if (p.has_used_q) {
    s.q_len = std::min(s.q_len, p.used_q[b]);
  }
  if (p.has_used_k) {
    s.k_len = std::min(s.k_len, p.used_k[b]);
  }
  return s;
}

std::int64_t plane_element(const Problem& p, const Tensor& plane, std::int64_t b, std::int64_t h, std::int64_t i,
                           std::int64_t j) {
  Index index = p.two_level ? Index{b / p.batch2, b % p.batch2, h, i, j} : Index{b, h, i, j};
  for (int d = 0; d < plane.view.rank; ++d) {
    index[d] = plane.view.shape[d] == 1 ? 0 : index[d];
  }
  return plane.element(index);
}

bool takes_part(const Problem& p, const Tensor* mask, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const math::Sequence s = sequence_of(p, b);
  return p.band(b, s).allowed(i, j) && (mask == nullptr || mask->get(plane_element(p, *mask, b, h, i, j)) != 0);
}

Tensors::Tensors(const Case& c) : case_(c), shapes_(c.problem), problem_(shapes_.get()) {
  using Kind = Tensor::Kind;
  add("q", Kind::kQueries, false, &fovea_problem::q);
  add("k", Kind::kKeys, false, &fovea_problem::k);
  add("v", Kind::kKeys, false, &fovea_problem::v);
  add("bias", Kind::kPlane, false, &fovea_problem::bias);
  add("bias2", Kind::kPlane, false, &fovea_problem::bias2);
  add("mask", Kind::kPlane, false, &fovea_problem::mask);
  add("alibi_slopes", Kind::kVector, false, &fovea_problem::alibi_slopes);
  add("sink", Kind::kVector, false, &fovea_problem::sink);
  add("cu_seqlens_q", Kind::kVector, false, &fovea_problem::cu_seqlens_q);
  add("cu_seqlens_k", Kind::kVector, false, &fovea_problem::cu_seqlens_k);
  add("seqused_q", Kind::kVector, false, &fovea_problem::seqused_q);
  add("seqused_k", Kind::kVector, false, &fovea_problem::seqused_k);
  add("positions_q", Kind::kVector, false, &fovea_problem::positions_q);
  add("positions_k", Kind::kVector, false, &fovea_problem::positions_k);
  add("dropout_streams", Kind::kVector, false, &fovea_problem::dropout_streams);
  add("out", Kind::kQueries, true, &fovea_problem::out);
  add("lse", Kind::kStatistics, true, &fovea_problem::lse);
  add("grad_out", Kind::kQueries, false, &fovea_problem::grad_out);
  add("grad_lse", Kind::kStatistics, false, &fovea_problem::grad_lse);
  add("grad_q", Kind::kQueries, true, &fovea_problem::grad_q);
  add("grad_k", Kind::kKeys, true, &fovea_problem::grad_k);
  add("grad_v", Kind::kKeys, true, &fovea_problem::grad_v);
  add("grad_bias", Kind::kPlane, true, &fovea_problem::grad_bias);
  add("grad_bias2", Kind::kPlane, true, &fovea_problem::grad_bias2);
  add("grad_sink", Kind::kVector, true, &fovea_problem::grad_sink);
  fill_family();
}

void Tensors::add(std::string_view name, Tensor::Kind kind, bool output, const fovea_tensor* fovea_problem::*member) {
  const fovea_tensor* shape = shapes_.get().*member;
  if (shape == nullptr) {
    return;
  }
  tensors_.push_back({name, kind, output, member, *shape, nullptr, 0, {}});
  Tensor& tensor = tensors_.back();
  const bool integers = tensor.type() == DType::kInt32 || tensor.type() == DType::kInt64;
  std::vector<std::int64_t> values;
  if (name == "dropout_streams") {  // any numbers
    Random random(case_.seed, name);
    for (std::int64_t n = 0; n < elements_of(*shape); ++n) {
      values.push_back(random.word());
    }
  } else if (integers) {  // Shapes has them; cu_seqlens come in either type
    for (std::int64_t n = 0; n < shape->shape[0]; ++n) {
      values.push_back(tensor.type() == DType::kInt32 ? static_cast<const std::int32_t*>(shape->data)[n]
                                                      : static_cast<const std::int64_t*>(shape->data)[n]);
    }
    if (case_.seed % 2 == 0 && name.starts_with("cu_seqlens")) {
      tensor.view.dtype = FOVEA_INT32;
    }
  }
  constexpr std::string_view kParts[] = {"q", "k", "v"};
  const std::string_view plain = name.starts_with("grad_") ? name.substr(5) : name;
  place(tensor, static_cast<int>(std::find(std::begin(kParts), std::end(kParts), plain) - std::begin(kParts)));
  tensor.view.data = tensor.buffer->data() + tensor.base * static_cast<std::int64_t>(size_of(tensor.type()));
  problem_.*member = &tensor.view;
  list_existing(tensor);
  for (std::size_t n = 0; n < values.size(); ++n) {
    const auto element = tensor.existing[n];
    if (tensor.type() == DType::kInt32) {
      reinterpret_cast<std::int32_t*>(tensor.buffer->data())[element] = static_cast<std::int32_t>(values[n]);
    } else {
      reinterpret_cast<std::int64_t*>(tensor.buffer->data())[element] = values[n];
    }
  }
  if (!output && !integers) {
    fill(tensor);
  }
}

// Strides, buffer and base. `part`: 0, 1, 2 for q, k, v and their gradients, which share a tensor under qkv3.
void Tensors::place(Tensor& tensor, int part) {
  const Problem& p = case_.problem;
  fovea_tensor& view = tensor.view;
  const int rank = view.rank;
  const bool rows = tensor.kind == Tensor::Kind::kQueries || tensor.kind == Tensor::Kind::kKeys;
  const bool one_tensor = p.layout == Layout::kQkv3 && part < 3;
  view.flags = FOVEA_TENSOR_STRIDED;

  // From the innermost dimension outwards. Under bhsd heads are further out than rows.
  std::array<int, FOVEA_MAX_RANK> order{};
  for (int n = 0; n < rank; ++n) {
    order[n] = rank - 1 - n;
  }
  if (rows && p.layout == Layout::kBhsd) {
    std::swap(order[1], order[2]);
  }
  const bool strided = p.layout == Layout::kStrided;
  std::int64_t stride = strided ? 2 : 1;
  for (int n = 0; n < rank; ++n) {
    const int d = order[n];
    view.stride[d] = stride;
    stride *= view.shape[d];
    if (one_tensor && n == 1) {
      stride = p.heads_q * p.head_dim + p.heads_k * (p.head_dim + p.head_dim_v);
    }
    // A skew is an odd end to every row, and to the base below; strided has gaps all over.
    const int row = rows && p.layout != Layout::kBhsd ? 1 : 0;
    stride += (n == row ? p.skew : 0) + (strided ? 3 : 0);
  }
  tensor.base = p.skew;
  if (one_tensor) {
    tensor.base += part == 0 ? 0 : p.heads_q * p.head_dim + (part == 2 ? p.heads_k * p.head_dim : 0);
  }
  if (strided && rank > 1) {  // the rows run backwards
    const int d = rows ? rank - 3 : rank - 2;
    tensor.base += std::max<std::int64_t>(view.shape[d] - 1, 0) * view.stride[d];
    view.stride[d] = -view.stride[d];
  }

  if (one_tensor) {  // which has as many rows as the longer of queries and keys
    const std::int64_t queries = p.packed ? p.total_q : p.batch() * p.seqlen_q;
    const std::int64_t keys = p.packed ? p.total_k : p.batch() * p.seqlen_k;
    stride = view.stride[rank - 3] * std::max(queries, keys);
  }
  const std::size_t size = static_cast<std::size_t>(stride + p.skew) * size_of(tensor.type());
  if (one_tensor) {
    auto& shared = tensor.output ? gradients_of_one_tensor_ : inputs_of_one_tensor_;
    if (!shared) {
      shared = std::make_shared<Buffer>(size);
      tensor.buffer = shared;
      poison(tensor);
    }
    tensor.buffer = shared;
  } else if (tensor.kind == Tensor::Kind::kPlane && !tensor.output && elements_of(view) > 0) {
    // A bias or mask is read by vectors of keys, of which the last may have fewer.
    std::int64_t last = tensor.base;
    for (int d = 0; d < rank; ++d) {
      last += std::max<std::int64_t>(view.stride[d], 0) * (view.shape[d] - 1);
    }
    tensor.buffer =
        std::make_shared<Buffer>(Buffer::before_a_guard(static_cast<std::size_t>(last + 1) * size_of(tensor.type())));
    poison(tensor);
  } else {
    tensor.buffer = std::make_shared<Buffer>(size);
    poison(tensor);
  }
}

void Tensors::list_existing(Tensor& tensor) const {
  const Problem& p = case_.problem;
  const int rank = tensor.view.rank;
  if (tensor.kind == Tensor::Kind::kVector || (tensor.kind == Tensor::Kind::kPlane && tensor.output)) {
    // Of a bias's gradient every element is written, padding included.
    for_each_index(tensor, [&](const Index&, std::int64_t element) { tensor.existing.push_back(element); });
    return;
  }
  // Which indices belong to a sequence, by batch entry and row (query, key) within it.
  std::vector<math::Sequence> sequences;
  for (std::int64_t b = 0; b < p.batch(); ++b) {
    sequences.push_back(sequence_of(p, b));
  }
  const bool keys = tensor.kind == Tensor::Kind::kKeys;
  const int levels =
      tensor.kind == Tensor::Kind::kPlane ? rank - 3 : rank - (tensor.kind == Tensor::Kind::kStatistics ? 2 : 3);
  const auto exists = [&](const Index& index) {
    for (std::int64_t b = 0; b < p.batch(); ++b) {
      const std::int64_t entry[2] = {p.two_level ? b / p.batch2 : b, b % p.batch2};
      bool same = true;
      for (int d = 0; d < levels; ++d) {
        same = same && (index[d] == entry[d] || tensor.view.shape[d] == 1);
      }
      const math::Sequence& s = sequences[static_cast<std::size_t>(b)];
      if (!same) {
        continue;
      }
      if (tensor.kind == Tensor::Kind::kPlane) {
        if (index[rank - 2] < s.q_len && index[rank - 1] < s.k_len) {
          return true;
        }
        continue;
      }
      const std::int64_t row = index[tensor.kind == Tensor::Kind::kStatistics ? rank - 1 : rank - 3];
      const std::int64_t begin = keys ? s.k_begin : s.q_begin;
      if (begin <= row && row < begin + (keys ? s.k_len : s.q_len)) {
        return true;
      }
    }
    return false;
  };
  for_each_index(tensor, [&](const Index& index, std::int64_t element) {
    if (exists(index)) {
      tensor.existing.push_back(element);
    }
  });
}

void Tensors::poison(const Tensor& tensor) {
  const std::size_t count = tensor.buffer->size() / size_of(tensor.type());
  for (std::size_t n = 0; n < count; ++n) {
    if (tensor.type() == DType::kInt32 || tensor.type() == DType::kInt64 || tensor.type() == DType::kBool) {
      std::memset(tensor.buffer->data() + n * size_of(tensor.type()), 0x7F, size_of(tensor.type()));
    } else {
      tensor.set(static_cast<std::int64_t>(n), std::numeric_limits<double>::quiet_NaN());
    }
  }
}

const Tensor* Tensors::find(std::string_view name) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](const Tensor& t) { return t.name == name; });
  return found == tensors_.end() ? nullptr : &*found;
}

fovea_problem Tensors::problem(Direction direction) const {
  fovea_problem problem = problem_;
  if (direction == Direction::kForward) {
    problem.accumulate = is_added(*find("out"), direction) ? FOVEA_ACCUMULATE_OUT : 0;
  }
  return problem;
}

bool Tensors::is_added(const Tensor& tensor, Direction direction) const {
  const Results& added = case_.problem.accumulate;
  if (direction == Direction::kForward) {
    return (tensor.name == "out" || tensor.name == "lse") && forward_of(case_.problem).accumulate.out;
  }
  return (tensor.name == "grad_q" && added.q) || (tensor.name == "grad_k" && added.k) ||
         (tensor.name == "grad_v" && added.v) || (tensor.name == "grad_bias" && added.bias) ||
         (tensor.name == "grad_bias2" && added.bias2) || (tensor.name == "grad_sink" && added.sink);
}

std::vector<double> Tensors::before(const Tensor& tensor) const {
  Random random(case_.seed, tensor.name);
  std::vector<double> numbers;
  for (std::size_t n = 0; n < tensor.existing.size(); ++n) {
    numbers.push_back(static_cast<float>(random.normal()));
  }
  return numbers;
}

std::vector<const Tensor*> Tensors::outputs(Direction direction) const {
  std::vector<const Tensor*> found;
  for (const Tensor& tensor : tensors_) {
    if (tensor.output && tensor.name.starts_with("grad_") == (direction == Direction::kBackward)) {
      found.push_back(&tensor);
    }
  }
  return found;
}

void Tensors::prepare(Direction direction) const {
  for (const Tensor* tensor : outputs(direction)) {
    tensor->buffer->fill_with_pattern();
  }
  for (const Tensor* tensor : outputs(direction)) {  // after all are filled: some share a buffer
    const std::size_t size = size_of(tensor->type());
    for (const std::int64_t element : tensor->existing) {
      tensor->buffer->allow(static_cast<std::size_t>(element) * size, size);
    }
    for (const std::int64_t element : cleared(*tensor, direction)) {
      tensor->buffer->allow(static_cast<std::size_t>(element) * size, size);
    }
    if (is_added(*tensor, direction)) {
      const std::vector<double> numbers = before(*tensor);
      for (std::size_t n = 0; n < numbers.size(); ++n) {
        tensor->set(tensor->existing[n], numbers[n]);
      }
    }
  }
}

std::string Tensors::trespass(Direction direction) const {
  for (const Tensor* tensor : outputs(direction)) {
    std::ptrdiff_t where = 0;
    if (tensor->buffer->changed(&where)) {
      return fmt::format("{}: byte {} of its buffer of {} was written, where no element is to be", tensor->name, where,
                         tensor->buffer->size());
    }
    const double nothing = tensor->kind == Tensor::Kind::kStatistics ? -std::numeric_limits<double>::infinity() : 0;
    for (const std::int64_t element : cleared(*tensor, direction)) {
      if (tensor->get(element) != nothing) {
        return fmt::format("{}: element {}, of a row that does not exist, is {}, not {} (clear)", tensor->name, element,
                           tensor->get(element), nothing);
      }
    }
  }
  return "";
}

std::vector<std::int64_t> Tensors::cleared(const Tensor& tensor, Direction direction) const {
  std::vector<std::int64_t> elements;
  const bool has_rows = tensor.kind != Tensor::Kind::kPlane && tensor.kind != Tensor::Kind::kVector;
  if (case_.problem.clear_rows && has_rows && !is_added(tensor, direction)) {
    const std::set<std::int64_t> existing(tensor.existing.begin(), tensor.existing.end());
    for_each_index(tensor, [&](const Index&, std::int64_t element) {
      if (!existing.contains(element)) {
        elements.push_back(element);
      }
    });
  }
  return elements;
}

}  // namespace fovea::check
