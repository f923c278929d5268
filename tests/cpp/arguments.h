// SPDX-License-Identifier: Apache-2.0
//
// A fovea_problem that is right, with memory for every argument, for tests that make it wrong in one place. Outputs
// are poisoned, and `untouched()` says whether they still are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/problem.h"

namespace fovea::testing {

class Arguments {
 public:
  enum class Rows { kDense, kTwoLevel, kPacked };

  // Everything is given: B=2 (two levels: 1 x 2), Hq=4, Hk=2, Sq=3, Sk=5, D=8, Dv=6; packed: lengths 1, 3 and 5, 2.
  Arguments(Rows rows, Direction direction, DType type = DType::kFp32) : direction_(direction) {
    problem.size = sizeof(problem);
    problem.backend = "reference";
    const DType sums = type == DType::kFp64 ? DType::kFp64 : DType::kFp32;
    const Ints batch = rows == Rows::kTwoLevel ? Ints{1, 2} : rows == Rows::kDense ? Ints{2} : Ints{};
    const bool packed = rows == Rows::kPacked;
    const auto of = [&](std::initializer_list<std::int64_t> rest) {
      Ints shape = batch;
      shape.insert(shape.end(), rest);
      return shape;
    };
    const std::int64_t rows_q = packed ? 5 : 3;  // packed: one row behind the last sequence
    const std::int64_t rows_k = packed ? 8 : 5;
    problem.q = add("q", type, of({rows_q, 4, 8}));
    problem.k = add("k", type, of({rows_k, 2, 8}));
    problem.v = add("v", type, of({rows_k, 2, 6}));
    problem.bias = add("bias", sums, {2, 4, 3, 5});
    problem.bias2 = add("bias2", type, {4, 1, 5});
    problem.mask = add("mask", DType::kBool, {3, 5}, 1);
    problem.alibi_slopes = add("alibi_slopes", sums, {4});
    problem.sink = add("sink", sums, {4});
    if (packed) {
      problem.cu_seqlens_q = integers<std::int32_t>("cu_seqlens_q", DType::kInt32, {0, 1, 4});
      problem.cu_seqlens_k = integers<std::int64_t>("cu_seqlens_k", DType::kInt64, {0, 5, 7});
    }
    problem.seqused_q = integers<std::int32_t>("seqused_q", DType::kInt32, {1, 2});
    problem.seqused_k = integers<std::int32_t>("seqused_k", DType::kInt32, {4, 2});
    problem.out = add("out", type, of({rows_q, 4, 6}));
    problem.lse = add("lse", sums, of({4, rows_q}));
    if (direction == Direction::kBackward) {
      problem.grad_out = add("grad_out", type, of({rows_q, 4, 6}));
      problem.grad_lse = add("grad_lse", sums, of({4, rows_q}));
      problem.grad_q = add("grad_q", type, of({rows_q, 4, 8}));
      problem.grad_k = add("grad_k", type, of({rows_k, 2, 8}));
      problem.grad_v = add("grad_v", type, of({rows_k, 2, 6}));
      problem.grad_bias = add("grad_bias", sums, {2, 4, 3, 5});
      problem.grad_bias2 = add("grad_bias2", type, {4, 1, 5});
      problem.grad_sink = add("grad_sink", sums, {4});
    } else {
      outputs_ = {"out", "lse"};
    }
    for (const auto& [name, tensor] : tensors_) {
      if (name.rfind("grad_", 0) == 0 && name != "grad_out" && name != "grad_lse") {
        outputs_.push_back(name);
      }
    }
    for (const std::string& name : outputs_) {
      std::fill(memory_[name].begin(), memory_[name].end(), kPoison);
    }
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  fovea_tensor& operator[](const std::string& name) { return tensors_.at(name); }
  template <class T>
  T* data(const std::string& name) {
    return reinterpret_cast<T*>(memory_.at(name).data());
  }
  Direction direction() const { return direction_; }

  void reshape(const std::string& name, const std::vector<std::int64_t>& shape) {
    fovea_tensor& tensor = tensors_.at(name);
    tensor.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
  }
  void stride(const std::string& name, const std::vector<std::int64_t>& strides) {
    fovea_tensor& tensor = tensors_.at(name);
    tensor.flags = FOVEA_TENSOR_STRIDED;
    std::copy(strides.begin(), strides.end(), tensor.stride);
  }
  void type(const std::string& name, std::int32_t dtype) { tensors_.at(name).dtype = dtype; }

  bool untouched() const {
    return std::all_of(outputs_.begin(), outputs_.end(), [&](const std::string& name) {
      const auto& bytes = memory_.at(name);
      return std::all_of(bytes.begin(), bytes.end(), [](unsigned char byte) { return byte == kPoison; });
    });
  }

  bool same_outputs_as(const Arguments& other) const {
    return std::all_of(outputs_.begin(), outputs_.end(),
                       [&](const std::string& name) { return memory_.at(name) == other.memory_.at(name); });
  }

  fovea_problem problem{};

 private:
  using Ints = std::vector<std::int64_t>;
  static constexpr unsigned char kPoison = 0xA5;
  static constexpr std::size_t kRoom = 4096;  // behind each tensor: shapes that tests make larger stay inside

  const fovea_tensor* add(const std::string& name, DType type, const Ints& shape, unsigned char fill = 0) {
    fovea_tensor tensor{};
    tensor.size = sizeof(tensor);
    tensor.dtype = static_cast<std::int32_t>(type);
    tensor.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
    memory_[name].assign(kRoom, fill);
    tensor.data = memory_[name].data();
    return &(tensors_[name] = tensor);
  }

  template <class T>
  const fovea_tensor* integers(const std::string& name, DType type, const std::vector<T>& values) {
    const fovea_tensor* tensor = add(name, type, {static_cast<std::int64_t>(values.size())});
    std::memcpy(memory_[name].data(), values.data(), values.size() * sizeof(T));
    return tensor;
  }

  Direction direction_;
  std::map<std::string, fovea_tensor> tensors_;
  std::map<std::string, std::vector<unsigned char>> memory_;
  std::vector<std::string> outputs_;
};

// The call, without a workspace.
inline fovea_status run(Arguments& a) {
  return a.direction() == Direction::kForward ? fovea_forward(&a.problem, nullptr, 0)
                                              : fovea_backward(&a.problem, nullptr, 0);
}

}  // namespace fovea::testing
