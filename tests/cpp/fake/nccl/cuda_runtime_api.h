// SPDX-License-Identifier: Apache-2.0
//
// A CUDA runtime that is played: what fovea/parallel_nccl.h and examples/parallel/nccl.cpp use, on memory of the host.
#ifndef FOVEA_TESTS_CUDA_RUNTIME_API_H
#define FOVEA_TESTS_CUDA_RUNTIME_API_H

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeDevice = 2 };
using cudaStream_t = struct CUstream_st*;

struct cudaPointerAttributes {
  cudaMemoryType type;
};

namespace played {
inline thread_local bool captures = false;  // a graph captures this thread's streams
// What cudaMalloc() gave: other memory is the host's. Only first addresses are known.
inline std::mutex mutex_of_memory;
inline std::set<const void*> memory_of_device;
}  // namespace played

inline const char* cudaGetErrorString(cudaError_t) { return "played"; }
inline cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  *data = std::malloc(bytes);
  const std::lock_guard<std::mutex> lock(played::mutex_of_memory);
  played::memory_of_device.insert(*data);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  const std::lock_guard<std::mutex> lock(played::mutex_of_memory);
  played::memory_of_device.erase(data);
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
// As CUDA's: no run is longer than its pitch.
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) {
    return cudaErrorInvalidValue;
  }
  for (std::size_t n = 0; n < height; ++n) {
    std::memcpy(static_cast<char*>(to) + n * to_pitch, static_cast<const char*>(from) + n * from_pitch, width);
  }
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = played::captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const std::lock_guard<std::mutex> lock(played::mutex_of_memory);
  attributes->type = played::memory_of_device.count(data) > 0 ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

#endif
