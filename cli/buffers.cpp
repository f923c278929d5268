// SPDX-License-Identifier: Apache-2.0
#include "buffers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <random>

#include "core/element.h"
#include "work.h"

namespace fovea::cli {
namespace {

// A stock of N(0, 1) that is drawn on from ever another place: filling gigabytes must not take longer than the run.
class Normals {
 public:
  explicit Normals(std::uint64_t seed) : random_(seed), stock_(kStock) {
    const auto uniform = [this] { return (static_cast<double>(random_() >> 11) + 0.5) * 0x1p-53; };
    for (double& value : stock_) {
      value = std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform());
    }
  }

  void fill(void* data, DType type, std::int64_t count) {
    for (std::int64_t n = 0; n < count; ++n) {
      if (n % kRun == 0) {
        at_ = random_() % (kStock - kRun);
      }
      const double value = stock_[at_ + n % kRun];
      if (type == DType::kBool) {
        static_cast<std::uint8_t*>(data)[n] = value < 0.5 ? 1 : 0;
      } else {
        store(data, type, n, value);
      }
    }
  }

 private:
  static constexpr std::size_t kStock = 1 << 16;
  static constexpr std::int64_t kRun = 64;
  std::mt19937_64 random_;
  std::vector<double> stock_;
  std::size_t at_ = 0;
};

// Elements from the first to the last that the strides reach; all of them go forwards.
std::int64_t span_of(const fovea_tensor& tensor) {
  std::int64_t last = 0;
  std::int64_t row_major = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    if (tensor.shape[d] == 0) {
      return 0;
    }
    const bool strided = (tensor.flags & FOVEA_TENSOR_STRIDED) != 0;
    last += (tensor.shape[d] - 1) * (strided ? std::abs(tensor.stride[d]) : row_major);
    row_major *= tensor.shape[d];
  }
  return last + 1;
}

}  // namespace

Buffers::Buffers(const Problem& problem, std::uint64_t seed)
    : problem_(problem), shapes_(problem_), given_(shapes_.get()) {
  Normals normals(seed);
  for (const fovea_tensor* fovea_problem::*member :
       {&fovea_problem::q, &fovea_problem::k, &fovea_problem::v, &fovea_problem::bias, &fovea_problem::bias2,
        &fovea_problem::mask, &fovea_problem::alibi_slopes, &fovea_problem::sink, &fovea_problem::out,
        &fovea_problem::lse, &fovea_problem::grad_out, &fovea_problem::grad_lse, &fovea_problem::grad_q,
        &fovea_problem::grad_k, &fovea_problem::grad_v, &fovea_problem::grad_bias, &fovea_problem::grad_bias2,
        &fovea_problem::grad_sink}) {
    if (given_.*member == nullptr) {
      continue;
    }
    fovea_tensor& tensor = tensors_.emplace_back(*(given_.*member));
    const auto type = static_cast<DType>(tensor.dtype);
    const std::int64_t count = span_of(tensor);
    memory_.emplace_back(static_cast<std::size_t>(count) * size_of(type));
    tensor.data = memory_.back().data();
    normals.fill(tensor.data, type, count);
    given_.*member = &tensor;
  }
}

void Buffers::forward() const { Caller(given_, Direction::kForward)(); }

std::size_t Buffers::bytes() const {
  std::size_t sum = 0;
  for (const auto& memory : memory_) {
    sum += memory.size();
  }
  return sum;
}

}  // namespace fovea::cli
