// SPDX-License-Identifier: Apache-2.0
//
// The same on GPUs, over NCCL, a thread of one process for each GPU:
//
//     ./nccl [keys|heads [ranks]]          as many ranks as this machine has GPUs
//
//     g++ -std=c++17 -O2 nccl.cpp -o nccl -I.../fovea/include -I$CUDA_HOME/include -L.../fovea/lib -lfovea -lnccl
//     -lcudart
//
// Results are compared with one GPU's. No bits are promised there: tiles of a rank's rows begin elsewhere.
#include <fovea/parallel_nccl.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "attention.h"

namespace {

namespace parallel = fovea::parallel;

// Memory of this thread's GPU.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) {
    parallel::detail::check_cuda(cudaMalloc(&data_, bytes == 0 ? 1 : bytes), "cudaMalloc");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

struct OnDevice {
  explicit OnDevice(example::Tensors& t)
      : host{&t.q, &t.k, &t.v, &t.grad_out, &t.out, &t.lse, &t.grad_q, &t.grad_k, &t.grad_v} {
    for (std::vector<float>* numbers : host) {
      memory.push_back(std::make_unique<DeviceMemory>(numbers->size() * sizeof(float)));
    }
    copy(/*back=*/false);
  }
  void copy(bool back) {
    for (std::size_t n = 0; n < host.size(); ++n) {
      void* const to = back ? static_cast<void*>(host[n]->data()) : memory[n]->data();
      const void* const from = back ? memory[n]->data() : host[n]->data();
      parallel::detail::check_cuda(cudaMemcpy(to, from, host[n]->size() * sizeof(float), cudaMemcpyDefault),
                                   "cudaMemcpy");
    }
  }
  example::Addresses addresses() const {
    return {memory[0]->data(), memory[1]->data(), memory[2]->data(), memory[3]->data(), memory[4]->data(),
            memory[5]->data(), memory[6]->data(), memory[7]->data(), memory[8]->data()};
  }

  std::vector<std::vector<float>*> host;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
};

template <class Call>
void run_on_device(const Call& call) {
  DeviceMemory memory(fovea::workspace(call));
  fovea::Workspace workspace(memory.data(), fovea::workspace(call));
  fovea::run(call, workspace);
  parallel::detail::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(call.options.stream)), "fovea");
}

template <class Call>
void run_on_devices(const Call& call, const parallel::Rows& rows, const parallel::Collectives& group,
                    parallel::Move move) {
  const std::size_t bytes = parallel::workspace(call, rows, group, move);
  DeviceMemory memory(bytes);
  fovea::Workspace workspace(memory.data(), bytes);
  parallel::run(call, rows, group, workspace, move);
  parallel::detail::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(call.options.stream)), "fovea");
}

bool compute(const example::Sizes& sizes, const parallel::Rows& rows, ncclComm_t communicator, parallel::Move move) {
  const parallel::Collectives group = parallel::nccl_collectives(communicator);
  int devices = 1;
  parallel::detail::check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  const int device = group.rank % devices;
  parallel::detail::check_cuda(cudaSetDevice(device), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  parallel::detail::check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  fovea::Options options = example::options();
  options.device = fovea::Device::kCuda;
  options.device_index = device;
  options.stream = stream;
  const std::vector<std::int64_t> index = example::index_of(rows, group.rank);
  example::Tensors mine = example::make(sizes, index);
  OnDevice on_device(mine);
  run_on_devices(example::forward(sizes, mine.rows, on_device.addresses(), options), rows, group, move);
  run_on_devices(example::backward(sizes, mine.rows, on_device.addresses(), options), rows, group, move);
  on_device.copy(/*back=*/true);

  std::vector<std::int64_t> all(static_cast<std::size_t>(sizes.rows));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  example::Tensors alone = example::make(sizes, all);
  OnDevice alone_on_device(alone);
  run_on_device(example::forward(sizes, sizes.rows, alone_on_device.addresses(), options));
  run_on_device(example::backward(sizes, sizes.rows, alone_on_device.addresses(), options));
  alone_on_device.copy(/*back=*/true);
  return example::right(sizes, mine, alone, index, /*error=*/1e-5, group.rank);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "keys";
  int devices = 0;
  const bool has_devices = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  const int ranks = argc > 2 ? std::atoi(argv[2]) : devices;
  if (!has_devices || ranks < 1 || (how != "keys" && how != "heads")) {
    std::fprintf(stderr, "usage: %s [keys|heads [ranks]], on a machine with NVIDIA GPUs\n", argv[0]);
    return 2;
  }
  example::Sizes sizes;
  sizes.rows = 10000;
  sizes.key_heads = 2 * ranks;
  sizes.heads = 8 * ranks;
  std::vector<ncclComm_t> communicators(static_cast<std::size_t>(ranks));
  if (ncclCommInitAll(communicators.data(), ranks, nullptr) != ncclSuccess) {
    std::fprintf(stderr, "ncclCommInitAll failed\n");
    return 1;
  }
  const parallel::Rows rows = parallel::Rows::zigzag(sizes.rows, ranks);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto move = how == "heads" ? parallel::Move::kHeads : parallel::Move::kKeys;
        failed += compute(sizes, rows, communicators[rank], move) ? 0 : 1;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, ranks, error.what());
        std::_Exit(1);  // the others would wait for it
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::printf("%d ranks on %d GPUs, %s: %s\n", ranks, devices, how.c_str(), failed == 0 ? "as one" : "FAILED");
  return failed == 0 ? 0 : 1;
}
