// SPDX-License-Identifier: Apache-2.0
//
// Elements more than 2^31 (and 2^32 bytes) away from a tensor's base, in every tensor and by every stride: batch, row,
// head and column, forwards and backwards. The memory is a mapping without reserve of which only the pages that are
// touched exist, so the test costs seconds. The result has to be, bit for bit, that of the same numbers in small
// tensors.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include "check/run.h"
#include "core/element.h"

namespace fovea::check {
namespace {

constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 12345;  // elements from one index to the next

// Address space, not memory.
class Mapping {
 public:
  explicit Mapping(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Mapping() {
    if (data_ != MAP_FAILED) {
      munmap(data_, bytes_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  char* data() const { return static_cast<char*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

// A copy of a problem whose tensors have one dimension kFar apart.
class FarProblem {
 public:
  // `dimension` counts from the last one; `sign` is the direction of the stride.
  FarProblem(const fovea_problem& near, int dimension, std::int64_t sign) : problem(near) {
    const fovea_tensor* fovea_problem::*members[] = {
        &fovea_problem::q,        &fovea_problem::k,         &fovea_problem::v,         &fovea_problem::bias,
        &fovea_problem::mask,     &fovea_problem::out,       &fovea_problem::lse,       &fovea_problem::grad_out,
        &fovea_problem::grad_lse, &fovea_problem::grad_q,    &fovea_problem::grad_k,    &fovea_problem::grad_v,
        &fovea_problem::sink,     &fovea_problem::grad_bias, &fovea_problem::grad_sink, &fovea_problem::alibi_slopes};
    for (auto member : members) {
      if (near.*member != nullptr) {
        add(*(near.*member), dimension, sign);
        problem.*member = &tensors_.back();
      }
    }
  }

  // Moves every element, to the far memory or back.
  void copy(bool to_far) {
    for (std::size_t n = 0; n < tensors_.size(); ++n) {
      const fovea_tensor& far = tensors_[n];
      const fovea_tensor& near = *near_[n];
      std::int64_t count = 1;
      for (int d = 0; d < far.rank; ++d) {
        count *= far.shape[d];
      }
      const std::size_t size = size_of(static_cast<DType>(far.dtype));
      for (std::int64_t number = 0; number < count; ++number) {
        std::int64_t rest = number;
        std::int64_t far_at = 0;
        std::int64_t near_at = 0;
        for (int d = far.rank - 1; d >= 0; --d) {
          far_at += rest % far.shape[d] * far.stride[d];
          near_at += rest % far.shape[d] * near.stride[d];
          rest /= far.shape[d];
        }
        char* a = static_cast<char*>(far.data) + far_at * static_cast<std::int64_t>(size);
        char* b = static_cast<char*>(near.data) + near_at * static_cast<std::int64_t>(size);
        std::copy(to_far ? b : a, (to_far ? b : a) + size, to_far ? a : b);
      }
    }
  }

  bool ok = true;
  std::int64_t farthest = 0;  // elements
  fovea_problem problem;

 private:
  void add(const fovea_tensor& near, int dimension, std::int64_t sign) {
    fovea_tensor far = near;
    far.flags = FOVEA_TENSOR_STRIDED;
    const int chosen = std::max(far.rank - 1 - dimension, 0);
    std::int64_t stride = 1;
    for (int d = far.rank - 1; d >= 0; --d) {  // the others contiguous
      far.stride[d] = d == chosen ? sign * kFar : stride;
      stride *= d == chosen ? 1 : far.shape[d];
    }
    const std::int64_t span = std::max<std::int64_t>(far.shape[chosen] - 1, 0) * kFar;
    farthest = std::max(farthest, span);
    const auto size = static_cast<std::int64_t>(size_of(static_cast<DType>(far.dtype)));
    mappings_.emplace_back(static_cast<std::size_t>((span + stride) * size));
    ok = ok && mappings_.back().ok();
    far.data = mappings_.back().data() + (sign < 0 ? span * size : 0);
    tensors_.push_back(far);
    near_.push_back(&near);
  }

  std::deque<Mapping> mappings_;
  std::deque<fovea_tensor> tensors_;
  std::vector<const fovea_tensor*> near_;
};

struct FarCase {
  const char* line;
  int dimension;  // from the last
};

class OffsetsTest : public testing::TestWithParam<FarCase> {};

TEST_P(OffsetsTest, TheSameBitsAsInSmallTensors) {
  Case c;
  c.problem = parse(GetParam().line);
  const Tensors tensors(c);
  for (const char* backend : {"cpu", "reference"}) {
    for (const std::int64_t sign : {1, -1}) {
      FarProblem far(tensors.problem(), GetParam().dimension, sign);
      if (!far.ok) {
        std::printf("no address space for %s\n", GetParam().line);
        FAIL() << "mmap refused a mapping without reserve";
      }
      ASSERT_GT(far.farthest, std::int64_t{1} << 31);
      std::vector<std::vector<std::uint8_t>> near_bytes;
      const auto outputs = [&](Direction direction) {
        std::vector<std::uint8_t> bytes;
        for (const Tensor* tensor : tensors.outputs(direction)) {
          bytes.insert(bytes.end(), tensor->buffer->data(), tensor->buffer->data() + tensor->buffer->size());
        }
        return bytes;
      };
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        tensors.prepare(direction);
        far.copy(true);  // inputs, and the pattern of the outputs
        call_library(tensors.problem(), direction, backend);
        const auto expected = outputs(direction);
        call_library(far.problem, direction, backend);
        tensors.prepare(direction);
        far.copy(false);
        EXPECT_TRUE(outputs(direction) == expected) << backend << ' ' << sign;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Far, OffsetsTest,
    testing::Values(FarCase{"bwd b=2 hq=2 hk=1 sq=5 sk=6 d=8 bias=b,h,q,k mask=b,1,q,k sink alibi=b,h dlse", 3},
                    FarCase{"bwd b=2 hq=2 hk=1 sq=5 sk=6 d=8 bf16 bias=b,h,q,k mask=b,1,q,k sink alibi=h dlse", 2},
                    FarCase{"bwd b=2 hq=3 hk=1 sq=5 sk=6 d=8 bias=b,h,q,k mask=1,h,q,k sink dlse causal", 1},
                    FarCase{"bwd b=1 hq=2 sq=5 sk=6 d=4 fp16 bias=b,h,q,k:fp32 mask=b,1,q,k sink dlse", 0},
                    FarCase{"bwd b=2x2 hq=2 sq=3 sk=4 d=8 fp64 bias=b1,1,h,q,k dlse", 4},
                    FarCase{"bwd b=2 hq=2 seqs_q=3,4 seqs_k=5,2 d=8 bias=b,h,q,k sink dlse", 2}));

}  // namespace
}  // namespace fovea::check
