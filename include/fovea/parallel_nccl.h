// SPDX-License-Identifier: Apache-2.0
//
// fovea/parallel.h over NCCL: the collectives of a communicator. For programs that have nccl.h and CUDA's runtime; link
// both. fovea itself needs neither.
//
//     ncclComm_t communicator = ...;  // one for each rank, on its GPU
//     parallel::run(call, rows, parallel::nccl_collectives(communicator), workspace);
#ifndef FOVEA_PARALLEL_NCCL_H
#define FOVEA_PARALLEL_NCCL_H

#include <cuda_runtime_api.h>
#include <fovea/parallel.h>
#include <nccl.h>

namespace fovea {
inline namespace api_v0 {
namespace parallel {

namespace detail {

inline void check_nccl(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) {
    fail(FOVEA_DEVICE_ERROR, std::string(what) + ": " + ncclGetErrorString(result));
  }
}

inline void check_cuda(cudaError_t result, const char* what) {
  if (result != cudaSuccess) {
    fail(FOVEA_DEVICE_ERROR, std::string(what) + ": " + cudaGetErrorString(result));
  }
}

// A graph copies from the same address at every launch, and the host's numbers are gone then.
inline void check_capture(const void* from, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) {
    return;
  }
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, from), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeUnregistered) {
    fail(FOVEA_UNSUPPORTED,
         "stream: a graph captures it, and this call has numbers in the host's memory; accepted: no Rows::packed, and "
         "with dropout and Move::kHeads dropout_streams in the device's memory");
  }
}

}  // namespace detail

// The communicator is the caller's, and lives longer than the result. Failures are Errors of FOVEA_DEVICE_ERROR. A CUDA
// graph may capture calls, after each has run once, but not those that copy numbers of the host: with Rows::packed, and
// with dropout and Move::kHeads unless dropout_streams are given (entry * Hq + head; (B, Hq)). They are refused then.
inline Collectives nccl_collectives(ncclComm_t communicator) {
  Collectives group;
  detail::check_nccl(ncclCommUserRank(communicator, &group.rank), "ncclCommUserRank");
  detail::check_nccl(ncclCommCount(communicator, &group.ranks), "ncclCommCount");
  const int ranks = group.ranks;
  group.all_gather = [communicator](const void* send, void* receive, std::size_t bytes, void* stream) {
    detail::check_nccl(ncclAllGather(send, receive, bytes, ncclUint8, communicator, static_cast<cudaStream_t>(stream)),
                       "ncclAllGather");
  };
  group.reduce_scatter = [communicator](const float* send, float* receive, std::size_t count, void* stream) {
    detail::check_nccl(
        ncclReduceScatter(send, receive, count, ncclFloat32, ncclSum, communicator, static_cast<cudaStream_t>(stream)),
        "ncclReduceScatter");
  };
  group.all_to_all = [communicator, ranks](const void* send, void* receive, std::size_t bytes, void* stream) {
    const auto ordered = static_cast<cudaStream_t>(stream);
    detail::check_nccl(ncclGroupStart(), "ncclGroupStart");
    ncclResult_t result = ncclSuccess;
    const char* what = "ncclSend";
    for (int rank = 0; rank < ranks && result == ncclSuccess; ++rank) {
      const std::size_t at = bytes * static_cast<std::size_t>(rank);
      result = ncclSend(static_cast<const char*>(send) + at, bytes, ncclUint8, rank, communicator, ordered);
      if (result == ncclSuccess) {
        what = "ncclRecv";
        result = ncclRecv(static_cast<char*>(receive) + at, bytes, ncclUint8, rank, communicator, ordered);
      }
    }
    // In any case: in a group that stays open nothing that this thread does with NCCL later would begin.
    const ncclResult_t ended = ncclGroupEnd();
    detail::check_nccl(result, what);
    detail::check_nccl(ended, "ncclGroupEnd");
  };
  group.copy = [](void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t bytes,
                  std::size_t times, void* stream) {
    const auto ordered = static_cast<cudaStream_t>(stream);
    if (times == 1) {
      detail::check_capture(from, ordered);
      detail::check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, ordered), "cudaMemcpyAsync");
    } else {
      detail::check_cuda(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, times, cudaMemcpyDefault, ordered),
                         "cudaMemcpy2DAsync");
    }
  };
  return group;
}

}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

#endif  // FOVEA_PARALLEL_NCCL_H
