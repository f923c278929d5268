// SPDX-License-Identifier: Apache-2.0
//
// lying_lengths: packed calls on a GPU that is played, whose cu_seqlens lie: sequences that overlap, that end behind
// the tensors or before they begin. Values on a device are not checked (docs/cuda.md), so nothing outside of results
// and workspace may be written. Exit code 1 with a line for each guard that is not as it was.
#include <fovea/c.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kRows = 1280;
constexpr std::int64_t kColumns = 64;
constexpr std::size_t kGuard = 4096;
constexpr unsigned char kPattern = 0xE5;

int trespasses = 0;

// Memory between two guards, full of a pattern that is no number to remember.
class Guarded {
 public:
  Guarded(std::string name, std::size_t bytes)
      : name_(std::move(name)), bytes_(bytes), memory_((bytes + 255) / 256 * 256 + 2 * kGuard + 256, kPattern) {}
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    for (const unsigned char* at : {data() - kGuard, data() + bytes_}) {
      for (std::size_t n = 0; n < kGuard; ++n) {
        if (at[n] != kPattern) {
          std::printf("%s: written %s it\n", name_.c_str(), at < data() ? "before" : "behind");
          ++trespasses;
          return;
        }
      }
    }
  }

  unsigned char* data() {
    const auto first = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
    return memory_.data() + kGuard + (256 - first % 256) % 256;
  }

 private:
  std::string name_;
  std::size_t bytes_;
  std::vector<unsigned char> memory_;
};

fovea_tensor tensor(void* data, fovea_dtype type, const std::vector<std::int64_t>& shape) {
  fovea_tensor result = {};
  result.size = sizeof result;
  result.data = data;
  result.dtype = type;
  result.rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t n = 0; n < shape.size(); ++n) {
    result.shape[n] = shape[n];
  }
  return result;
}

void succeed(fovea_status status, const char* what) {
  if (status != FOVEA_OK) {
    std::printf("%s: %s\n", what, fovea_last_error());
    std::exit(2);
  }
}

void compute(const std::vector<std::int32_t>& ends_q, const std::vector<std::int32_t>& ends_k) {
  constexpr std::size_t kBytes = kRows * kColumns * 2;
  std::vector<std::uint16_t> numbers(kRows * kColumns, 0x3C00);
  Guarded out("out", kBytes);
  Guarded lse("lse", kRows * 4);
  Guarded grad_q("grad_q", kBytes);
  Guarded grad_k("grad_k", kBytes);
  Guarded grad_v("grad_v", kBytes);
  const std::vector<std::int64_t> shape = {kRows, 1, kColumns};
  const auto batch = static_cast<std::int64_t>(ends_q.size());
  const fovea_tensor input = tensor(numbers.data(), FOVEA_FP16, shape);
  const fovea_tensor cu_q = tensor(const_cast<std::int32_t*>(ends_q.data()), FOVEA_INT32, {batch});
  const fovea_tensor cu_k = tensor(const_cast<std::int32_t*>(ends_k.data()), FOVEA_INT32, {batch});
  const fovea_tensor results[] = {tensor(out.data(), FOVEA_FP16, shape), tensor(lse.data(), FOVEA_FP32, {1, kRows}),
                                  tensor(grad_q.data(), FOVEA_FP16, shape), tensor(grad_k.data(), FOVEA_FP16, shape),
                                  tensor(grad_v.data(), FOVEA_FP16, shape)};
  fovea_problem problem = {};
  problem.size = sizeof problem;
  problem.device = FOVEA_CUDA;
  problem.q = problem.k = problem.v = &input;
  problem.cu_seqlens_q = &cu_q;
  problem.cu_seqlens_k = &cu_k;
  problem.max_seqlen_q = kRows;
  problem.max_seqlen_k = 64;
  problem.out = &results[0];
  problem.lse = &results[1];
  for (const fovea_direction direction : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
    if (direction == FOVEA_BACKWARD) {
      problem.grad_out = &input;
      problem.grad_q = &results[2];
      problem.grad_k = &results[3];
      problem.grad_v = &results[4];
    }
    std::size_t bytes = 0;
    succeed(fovea_workspace(&problem, direction, &bytes), "fovea_workspace");
    Guarded workspace(direction == FOVEA_FORWARD ? "workspace, forward" : "workspace, backward", bytes);
    succeed((direction == FOVEA_FORWARD ? fovea_forward : fovea_backward)(&problem, workspace.data(), bytes), "a call");
  }
}

}  // namespace

int main() {
  std::vector<std::int32_t> overlapping;
  std::vector<std::int32_t> keys;
  for (int n = 0; n < 25; ++n) {
    overlapping.push_back(n % 2 == 0 ? 0 : kRows);
    keys.push_back(n * 16);
  }
  compute(overlapping, keys);
  compute({0, 600, 2000000000}, {0, -7, 2147483647});
  compute({-5, 20, 10}, {60, 20, 10});
  std::printf("%d trespasses\n", trespasses);
  return trespasses == 0 ? 0 : 1;
}
