// SPDX-License-Identifier: Apache-2.0
//
// An NCCL that is played, with threads of one process as ranks: each function returns when its work is done. It copies
// by CUDA's runtime, which is played beside it. With the real one in its place, ranks may share one GPU.
#ifndef FOVEA_TESTS_NCCL_H
#define FOVEA_TESTS_NCCL_H

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

enum ncclResult_t { ncclSuccess = 0, ncclInvalidArgument = 4 };
enum ncclDataType_t { ncclUint8 = 1, ncclFloat32 = 7 };
enum ncclRedOp_t { ncclSum = 0 };

namespace played {

struct Message {
  const void* data;
  std::size_t bytes;
  int from, to;
};

struct Group {
  std::mutex mutex;
  std::condition_variable all_here;
  int ranks = 0, waiting = 0, round = 0;
  std::vector<Message> messages;  // of this round

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const int mine = round;
    if (++waiting == ranks) {
      waiting = 0;
      ++round;
      all_here.notify_all();
    } else {
      all_here.wait(lock, [&] { return round != mine; });
    }
  }
  // All ranks' messages; then receive() reads them.
  template <class Function>
  void meet(const std::vector<Message>& mine, Function receive) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      messages.insert(messages.end(), mine.begin(), mine.end());
    }
    wait();
    receive();
    wait();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      messages.clear();
    }
    wait();
  }
};

inline void copy(void* to, const void* from, std::size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }

struct Receive {
  void* data;
  std::size_t bytes;
  int from;
};

}  // namespace played

struct ncclComm {
  std::shared_ptr<played::Group> group;
  int rank;
  std::vector<played::Message> sends;  // since ncclGroupStart()
  std::vector<played::Receive> receives;
};
using ncclComm_t = ncclComm*;

namespace played {
inline thread_local ncclComm_t in_group = nullptr;
inline thread_local int open_groups = 0;
// What fails next, once: "ncclSend" or "ncclRecv". Null: nothing.
inline thread_local const char* fails = nullptr;

// As NCCL does: a group with a call that failed is given up, and its end says so.
inline thread_local bool has_failed = false;
inline bool fail_now(const char* what) {
  const bool fails_now = fails != nullptr && std::strcmp(fails, what) == 0;
  fails = fails_now ? nullptr : fails;
  has_failed = has_failed || fails_now;
  return fails_now;
}
}  // namespace played

inline const char* ncclGetErrorString(ncclResult_t) { return "played"; }
inline ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int ranks, const int*) {
  const auto group = std::make_shared<played::Group>();
  group->ranks = ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators[rank] = new ncclComm{group, rank, {}, {}};
  }
  return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete communicator;
  return ncclSuccess;
}
inline ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return ncclSuccess;
}
inline ncclResult_t ncclCommCount(ncclComm_t communicator, int* ranks) {
  *ranks = communicator->group->ranks;
  return ncclSuccess;
}
inline ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                                  ncclComm_t communicator, cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  if (type != ncclUint8) {
    return ncclInvalidArgument;
  }
  played::Group& group = *communicator->group;
  group.meet({{send, count, communicator->rank, -1}}, [&] {
    for (const played::Message& message : group.messages) {
      played::copy(static_cast<char*>(receive) + static_cast<std::size_t>(message.from) * count, message.data, count);
    }
  });
  return ncclSuccess;
}
inline ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                                      ncclRedOp_t, ncclComm_t communicator, cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  if (type != ncclFloat32) {
    return ncclInvalidArgument;
  }
  played::Group& group = *communicator->group;
  group.meet({{send, count, communicator->rank, -1}}, [&] {
    std::vector<float> sum(count, 0.0f), part(count);
    for (const played::Message& message : group.messages) {
      const auto* const mine =
          static_cast<const float*>(message.data) + static_cast<std::size_t>(communicator->rank) * count;
      played::copy(part.data(), mine, count * sizeof(float));
      for (std::size_t n = 0; n < count; ++n) {
        sum[n] += part[n];
      }
    }
    played::copy(receive, sum.data(), count * sizeof(float));
  });
  return ncclSuccess;
}
inline ncclResult_t ncclGroupStart() {
  played::in_group = nullptr;
  ++played::open_groups;
  return ncclSuccess;
}
inline ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t, int to, ncclComm_t communicator,
                             cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  played::in_group = communicator;
  if (played::fail_now("ncclSend")) {
    return ncclInvalidArgument;
  }
  communicator->sends.push_back({send, count, communicator->rank, to});
  return ncclSuccess;
}
inline ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t, int from, ncclComm_t communicator,
                             cudaStream_t) {
  if (played::fail_now("ncclRecv")) {
    return ncclInvalidArgument;
  }
  communicator->receives.push_back({receive, count, from});
  return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
  ncclComm& communicator = *played::in_group;
  played::Group& group = *communicator.group;
  --played::open_groups;
  if (played::has_failed) {
    played::has_failed = false;
    communicator.sends.clear();
    communicator.receives.clear();
    return ncclInvalidArgument;
  }
  group.meet(communicator.sends, [&] {
    for (const played::Receive& receive : communicator.receives) {
      for (const played::Message& message : group.messages) {
        if (message.from == receive.from && message.to == communicator.rank) {
          played::copy(receive.data, message.data, receive.bytes);
        }
      }
    }
  });
  communicator.sends.clear();
  communicator.receives.clear();
  return ncclSuccess;
}

#endif
