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
      FarProblem far(tensors.problem(Direction::kBackward), GetParam().dimension, sign);
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
        call_library(tensors.problem(direction), direction, backend);
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

// Rows whose number alone is beyond 32 bits: a packed problem whose last sequence begins at row 2^31. The 4096
// sequences before it have all those rows, of which, by seqused, none exists.
TEST(OffsetsTest, RowNumbersBeyond32Bits) {
  constexpr std::int64_t kSequences = 4096;
  constexpr std::int64_t kLength = std::int64_t{1} << 19;
  constexpr std::int64_t kBefore = kSequences * kLength;
  Case c;
  c.problem = parse("bwd b=4097 hq=1 seqs_q=0x4096,5 seqs_k=0x4096,6 used_q=0x4096,5 used_k=0x4096,6 d=2 causal dlse");
  const Tensors tensors(c);
  for (const char* backend : {"cpu", "reference"}) {
    fovea_problem far = tensors.problem(Direction::kForward);
    std::deque<Mapping> mappings;
    std::deque<fovea_tensor> views;
    const auto add = [&](const fovea_tensor* fovea_problem::*member) {
      const fovea_tensor& near = *(far.*member);
      views.push_back(near);
      fovea_tensor& view = views.back();
      const bool statistics = near.rank == 2;  // (heads, rows); the others are (rows, heads, head_dim)
      const int rows = statistics ? 1 : 0;
      view.flags = 0;
      view.shape[rows] += kBefore;
      const std::int64_t width = statistics ? 1 : near.shape[2];
      mappings.emplace_back(static_cast<std::size_t>(view.shape[rows] * width) * sizeof(float));
      ASSERT_TRUE(mappings.back().ok());
      view.data = mappings.back().data();
      std::copy_n(static_cast<const float*>(near.data), near.shape[rows] * width,
                  static_cast<float*>(view.data) + kBefore * width);
      far.*member = &view;
    };
    for (auto member : {&fovea_problem::q, &fovea_problem::k, &fovea_problem::v, &fovea_problem::out,
                        &fovea_problem::lse, &fovea_problem::grad_out, &fovea_problem::grad_lse, &fovea_problem::grad_q,
                        &fovea_problem::grad_k, &fovea_problem::grad_v}) {
      add(member);
    }
    std::vector<std::int64_t> boundaries[2];
    for (auto& side : boundaries) {
      for (std::int64_t n = 0; n <= kSequences; ++n) {
        side.push_back(n * kLength);
      }
    }
    boundaries[0].push_back(kBefore + 5);
    boundaries[1].push_back(kBefore + 6);
    fovea_tensor cu[2] = {*far.cu_seqlens_q, *far.cu_seqlens_k};
    for (fovea_tensor& tensor : cu) {
      tensor.dtype = FOVEA_INT64;
      tensor.flags = 0;
    }
    cu[0].data = boundaries[0].data();
    cu[1].data = boundaries[1].data();
    far.cu_seqlens_q = &cu[0];
    far.cu_seqlens_k = &cu[1];
    far.max_seqlen_q = far.max_seqlen_k = 0;
    far.backend = backend;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      call_library(tensors.problem(direction), direction, backend);
      std::size_t bytes = 0;
      ASSERT_EQ(fovea_workspace(&far, static_cast<fovea_direction>(direction), &bytes), FOVEA_OK);
      const Mapping workspace(bytes + 1);  // sparse as well: it grows with the rows
      ASSERT_TRUE(workspace.ok());
      const auto function = direction == Direction::kForward ? fovea_forward : fovea_backward;
      ASSERT_EQ(function(&far, workspace.data(), bytes), FOVEA_OK) << fovea_last_error();
      const auto same = [&](const fovea_tensor* fovea_problem::*member) {
        const fovea_tensor& near = *(tensors.problem(direction).*member);
        const std::int64_t width = near.rank == 2 ? 1 : near.shape[2];
        const std::int64_t rows = near.shape[near.rank == 2 ? 1 : 0];
        const float* a = static_cast<const float*>(near.data);
        const float* b = static_cast<const float*>((far.*member)->data) + kBefore * width;
        return std::equal(a, a + rows * width, b);
      };
      if (direction == Direction::kForward) {
        EXPECT_TRUE(same(&fovea_problem::out)) << backend;
        EXPECT_TRUE(same(&fovea_problem::lse)) << backend;
      } else {
        EXPECT_TRUE(same(&fovea_problem::grad_q)) << backend;
        EXPECT_TRUE(same(&fovea_problem::grad_k)) << backend;
        EXPECT_TRUE(same(&fovea_problem::grad_v)) << backend;
      }
    }
  }
}

}  // namespace
}  // namespace fovea::check
