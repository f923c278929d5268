// SPDX-License-Identifier: Apache-2.0
#include "cuda/config/target.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cuda/jit/nvrtc.h"

namespace fovea::cuda {
namespace {

constexpr int kKiB = 1024;

// CUDA C++ Programming Guide, "Compute Capabilities"; multiprocessors of the largest product.
constexpr Target kTargets[] = {
    {80, 163 * kKiB, 164 * kKiB, 108},  {86, 99 * kKiB, 100 * kKiB, 84},   {87, 163 * kKiB, 164 * kKiB, 16},
    {89, 99 * kKiB, 100 * kKiB, 142},   {90, 227 * kKiB, 228 * kKiB, 132}, {100, 227 * kKiB, 228 * kKiB, 148},
    {103, 227 * kKiB, 228 * kKiB, 160}, {120, 99 * kKiB, 100 * kKiB, 188}, {121, 99 * kKiB, 100 * kKiB, 48},
};

// Smaller products: A30, A10, L4, RTX 4090, H100 PCIe, H20, RTX 5090.
struct Product {
  int capability;
  int multiprocessors;
};
constexpr Product kProducts[] = {{80, 56}, {86, 72}, {89, 128}, {89, 58}, {90, 114}, {90, 78}, {120, 170}};

}  // namespace

std::string Target::architecture(bool specific) const {
  return jit::architecture(capability / 10, capability % 10, specific);
}

Target target_of(const jit::DeviceInfo& device) {
  return {device.capability(), device.shared_per_block, device.shared_per_multiprocessor, device.multiprocessors};
}

Target target_of(std::string_view architecture) {
  std::vector<std::string> accepted;
  for (const Target& target : kTargets) {
    for (const bool specific : {false, true}) {
      const std::string name = target.architecture(specific);
      if (name == architecture) {
        return target;
      }
      if (!specific) {
        accepted.push_back(name);
      }
    }
  }
  throw Error(FOVEA_INVALID_ARGUMENT,
              fmt::format("architecture: '{}'; accepted: {}", architecture, fmt::join(accepted, ", ")));
}

std::vector<Target> targets_of(std::string_view architecture) {
  std::vector<Target> targets = {target_of(architecture)};
  for (const Product& product : kProducts) {
    if (product.capability == targets.front().capability) {
      targets.push_back(targets.front());
      targets.back().multiprocessors = product.multiprocessors;
    }
  }
  return targets;
}

}  // namespace fovea::cuda
