// SPDX-License-Identifier: Apache-2.0
#include "check/gpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "check/run.h"

namespace fovea::check {
namespace {

using cuda::jit::ContextScope;
using cuda::jit::Driver;
namespace cu = cuda::jit::cu;

constexpr std::size_t kAlignment = 256;  // of cuMemAlloc
constexpr std::size_t kGap = 256;        // bytes between two tensors
constexpr std::uint8_t kNothing = 0xFF;  // a NaN in every type

// In the current context.
class DeviceMemory {
 public:
  DeviceMemory(const Driver& driver, std::size_t bytes) : driver_(driver) {
    cuda::jit::check(driver, driver.allocate(&begin_, bytes), "cuMemAlloc");
  }
  ~DeviceMemory() { driver_.free(begin_); }  // fails only after a fault, which the copies report
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* at(std::size_t offset) const { return reinterpret_cast<void*>(begin_ + offset); }  // NOLINT
  void upload(const std::uint8_t* from, std::size_t bytes) const {
    cuda::jit::check(driver_, driver_.copy_to_device(begin_, from, bytes, nullptr), "cuMemcpyHtoDAsync");
  }
  void download(std::uint8_t* to, std::size_t offset, std::size_t bytes) const {
    cuda::jit::check(driver_, driver_.copy_to_host(to, begin_ + offset, bytes, nullptr), "cuMemcpyDtoHAsync");
    cuda::jit::check(driver_, driver_.stream_synchronize(nullptr), "cuStreamSynchronize");
  }

 private:
  const Driver& driver_;
  cu::DevicePointer begin_ = 0;
};

struct Region {
  std::string_view name;  // of the tensor, or of the first of those that share the buffer
  Buffer* buffer;
  std::size_t offset;  // of the buffer's bytes, margins included
  bool output;         // of this direction
};

// Where each buffer is in the block. Its data are as far from a multiple of 64 there as in the host's memory: the
// alignment of a case is a part of it.
std::vector<Region> regions_of(const Tensors& tensors, Direction direction, std::size_t& end) {
  std::vector<Region> regions;
  const std::vector<const Tensor*> outputs = tensors.outputs(direction);
  end = kGap;
  for (const Tensor& tensor : tensors.all()) {
    Buffer* const buffer = tensor.buffer.get();
    if (std::any_of(regions.begin(), regions.end(), [&](const Region& r) { return r.buffer == buffer; })) {
      continue;
    }
    constexpr std::uintptr_t kKept = 64;
    const auto begin = reinterpret_cast<std::uintptr_t>(buffer->all().data());
    end += (begin - end) % kKept;
    const bool output = std::find(outputs.begin(), outputs.end(), &tensor) != outputs.end();
    regions.push_back({tensor.name, buffer, end, output});
    end += buffer->all().size() + kGap;
  }
  return regions;
}

}  // namespace

void call_on_gpu(const GpuCall& call) {
  const auto function = call.direction == Direction::kForward ? fovea_forward : fovea_backward;
  require(function(&call.problem, call.workspace, call.workspace_bytes));
}

Gpu::Gpu(int ordinal) : driver_(cuda::jit::driver()), info_(cuda::jit::device(ordinal)) {}

std::string Gpu::run(const Tensors& tensors, Direction direction, const Watch& watch,
                     const std::function<void(const GpuCall&)>& compute) const {
  const ContextScope scope(driver_, info_.ordinal);
  std::size_t workspace = 0;
  const std::vector<Region> regions = regions_of(tensors, direction, workspace);
  workspace = (workspace + kAlignment - 1) / kAlignment * kAlignment + 1;  // any alignment is accepted

  fovea_problem problem = tensors.problem(direction);
  problem.device = FOVEA_CUDA;
  problem.device_index = info_.ordinal;
  problem.backend = nullptr;
  std::deque<fovea_tensor> views;
  const auto set_addresses = [&](const auto& address) {
    views.clear();
    for (const Tensor& tensor : tensors.all()) {
      const auto region = std::find_if(regions.begin(), regions.end(),
                                       [&](const Region& r) { return r.buffer == tensor.buffer.get(); });
      fovea_tensor& view = views.emplace_back(tensor.view);
      view.data = address(region->offset + static_cast<std::size_t>(static_cast<const std::uint8_t*>(view.data) -
                                                                    region->buffer->all().data()));
      problem.*tensor.member = &view;
    }
  };
  // The size depends on which addresses are multiples of 16, and these on the offsets alone.
  set_addresses([](std::size_t offset) { return reinterpret_cast<void*>(offset + kAlignment); });  // NOLINT
  std::size_t bytes = 0;
  require(fovea_workspace(&problem, static_cast<fovea_direction>(direction), &bytes));

  const DeviceMemory memory(driver_, workspace + bytes + kGap);
  set_addresses([&](std::size_t offset) { return memory.at(offset); });
  require(fovea_prepare(&problem, static_cast<fovea_direction>(direction)));

  std::vector<std::uint8_t> before(workspace + bytes + kGap, kNothing);
  for (const Region& region : regions) {
    const std::span<std::uint8_t> all = region.buffer->all();
    const std::ptrdiff_t margin = region.output ? 0 : region.buffer->data() - all.data();  // an input's is NaN
    const std::size_t count = region.output ? all.size() : region.buffer->size();
    std::copy_n(all.begin() + margin, count, before.begin() + static_cast<std::ptrdiff_t>(region.offset) + margin);
  }
  std::vector<std::uint8_t> after = before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    watch.begin();
    try {
      memory.upload(before.data(), before.size());
      compute({problem, direction, memory.at(workspace), bytes});
      memory.download(after.data(), 0, workspace);
      memory.download(after.data() + workspace + bytes, workspace + bytes, kGap);
    } catch (...) {
      watch.end(true);
      throw;
    }
    watch.end(false);
  }

  for (const Region& region : regions) {
    if (region.output) {
      const auto offset = static_cast<std::ptrdiff_t>(region.offset);
      const std::size_t size = region.buffer->all().size();
      std::copy_n(after.begin() + offset, size, region.buffer->all().begin());
      std::copy_n(before.begin() + offset, size, after.begin() + offset);
    }
  }
  const auto [was, is] = std::mismatch(before.begin(), before.end(), after.begin());
  if (was != before.end()) {
    const auto at = static_cast<std::size_t>(was - before.begin());
    if (at >= workspace + bytes) {
      return fmt::format("byte {} behind the workspace of {} was written", at - workspace - bytes, bytes);
    }
    const auto behind = std::find_if(regions.rbegin(), regions.rend(), [&](const Region& r) { return r.offset <= at; });
    return behind == regions.rend()
               ? fmt::format("a byte before all tensors was written")
               : fmt::format("{}: byte {} from the begin of its memory of {} was written, which is no output",
                             behind->name, at - behind->offset, behind->buffer->all().size());
  }
  return tensors.trespass(direction);
}

Case for_gpu(Case c) {
  for (DType* type : {&c.problem.type, &c.problem.bias.type, &c.problem.bias2.type}) {
    if (*type == DType::kFp64) {
      *type = DType::kFp32;
    }
  }
  c.problem.device = FOVEA_CPU;  // of the tensors that are made
  c.problem.backend.clear();
  return c;
}

}  // namespace fovea::check
