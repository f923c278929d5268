// SPDX-License-Identifier: Apache-2.0
//
// include/fovea/parallel_nccl.h over an NCCL and a CUDA runtime that are played (fake/nccl): threads as ranks. The
// problem is that of examples/parallel.
#include <fovea/parallel_nccl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "../../examples/parallel/attention.h"

static_assert(__cplusplus < 202002L, "this file is to be compiled as C++17");

namespace {

namespace parallel = fovea::parallel;

std::atomic<int> wrong{0};

void compute(const example::Sizes& sizes, const parallel::Rows& rows, ncclComm_t communicator, parallel::Move move,
             const example::Tensors& alone) {
  const parallel::Collectives group = parallel::nccl_collectives(communicator);
  const std::vector<std::int64_t> index = example::index_of(rows, group.rank);
  example::Tensors mine = example::make(sizes, index);
  const fovea::Options options = example::options();
  fovea::Workspace workspace;
  parallel::run(example::forward(sizes, mine.rows, example::addresses(mine), options), rows, group, workspace, move);
  parallel::run(example::backward(sizes, mine.rows, example::addresses(mine), options), rows, group, workspace, move);
  wrong += example::right(sizes, mine, alone, index, /*error=*/0, group.rank) ? 0 : 1;
}

TEST(ParallelNccl, IsOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    for (const parallel::Move move : {parallel::Move::kKeys, parallel::Move::kHeads}) {
      example::Sizes sizes;
      sizes.rows = 300;
      sizes.key_heads = ranks;
      sizes.heads = 4 * ranks;
      sizes.dim = 16;
      std::vector<std::int64_t> all(300);
      std::iota(all.begin(), all.end(), std::int64_t{0});
      example::Tensors alone = example::make(sizes, all);
      fovea::Workspace workspace;
      run(example::forward(sizes, 300, example::addresses(alone), example::options()), workspace);
      run(example::backward(sizes, 300, example::addresses(alone), example::options()), workspace);

      std::vector<ncclComm_t> communicators(static_cast<std::size_t>(ranks));
      ASSERT_EQ(ncclCommInitAll(communicators.data(), ranks, nullptr), ncclSuccess);
      const parallel::Rows rows = parallel::Rows::zigzag(300, ranks, 16);
      std::vector<std::thread> threads;
      wrong = 0;
      for (const ncclComm_t communicator : communicators) {
        threads.emplace_back([&, communicator] { compute(sizes, rows, communicator, move, alone); });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      EXPECT_EQ(wrong, 0) << ranks << " ranks";
      for (const ncclComm_t communicator : communicators) {
        ncclCommDestroy(communicator);
      }
    }
  }
}

TEST(ParallelNccl, FailuresAreErrors) {
  try {
    parallel::detail::check_nccl(ncclInvalidArgument, "ncclAllGather");
    FAIL();
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.status(), FOVEA_DEVICE_ERROR);
    EXPECT_STREQ(error.what(), "device error: ncclAllGather: played");
  }
  EXPECT_THROW(parallel::detail::check_cuda(cudaErrorInvalidValue, "cudaMemcpyAsync"), fovea::Error);
}

// A group that stays open would collect whatever the thread does with NCCL later, and begin none of it.
TEST(ParallelNccl, AGroupEndsThoughACallInItFails) {
  ncclComm_t communicator = nullptr;
  ASSERT_EQ(ncclCommInitAll(&communicator, 1, nullptr), ncclSuccess);
  const parallel::Collectives group = parallel::nccl_collectives(communicator);
  const std::vector<char> send{1, 2, 3};
  for (const char* call : {"ncclSend", "ncclRecv"}) {
    std::vector<char> receive(3);
    played::fails = call;
    try {
      group.all_to_all(send.data(), receive.data(), 3, nullptr);
      ADD_FAILURE() << call;
    } catch (const fovea::Error& error) {
      EXPECT_EQ(error.what(), std::string("device error: ") + call + ": played");
    }
    EXPECT_EQ(played::open_groups, 0);
    group.all_to_all(send.data(), receive.data(), 3, nullptr);
    EXPECT_EQ(receive, send);
    EXPECT_EQ(played::open_groups, 0);
  }
  ncclCommDestroy(communicator);
}

// The graph would read them at every launch, when they are gone.
TEST(ParallelNccl, NumbersOfTheHostAreNotCaptured) {
  ncclComm_t communicator = nullptr;
  ASSERT_EQ(ncclCommInitAll(&communicator, 1, nullptr), ncclSuccess);
  const parallel::Collectives group = parallel::nccl_collectives(communicator);
  const std::vector<char> host{1, 2, 3};
  void *from = nullptr, *to = nullptr;
  ASSERT_EQ(cudaMalloc(&from, 3), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&to, 3), cudaSuccess);
  group.copy(from, 3, host.data(), 3, 3, 1, nullptr);
  played::captures = true;
  group.copy(to, 3, from, 3, 3, 1, nullptr);
  EXPECT_EQ(std::memcmp(to, host.data(), 3), 0);
  try {
    group.copy(to, 3, host.data(), 3, 3, 1, nullptr);
    ADD_FAILURE();
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.status(), FOVEA_UNSUPPORTED);
    EXPECT_EQ(std::string(error.what()).rfind("unsupported: stream: a graph captures it", 0), 0u) << error.what();
  }
  played::captures = false;
  cudaFree(from);
  cudaFree(to);
  ncclCommDestroy(communicator);
}

}  // namespace
