// SPDX-License-Identifier: Apache-2.0
#include "cuda/config/print.h"

#include <fmt/format.h>

#include <string_view>

namespace fovea::cuda {
namespace {

std::string value_of(int value) { return std::to_string(value); }
std::string value_of(bool value) { return value ? "true" : "false"; }

std::string value_of(Type type) {
  switch (type) {
    case Type::kBf16:
      return "fovea::cuda::Type::kBf16";
    case Type::kFp16:
      return "fovea::cuda::Type::kFp16";
    case Type::kFp32:
      return "fovea::cuda::Type::kFp32";
  }
  return "";
}

std::string value_of(BiasTile bias) {
  switch (bias) {
    case BiasTile::kNone:
      return "fovea::cuda::BiasTile::kNone";
    case BiasTile::kBf16:
      return "fovea::cuda::BiasTile::kBf16";
    case BiasTile::kFp16:
      return "fovea::cuda::BiasTile::kFp16";
    case BiasTile::kFp32:
      return "fovea::cuda::BiasTile::kFp32";
  }
  return "";
}

std::string value_of(DropoutRule rule) {
  switch (rule) {
    case DropoutRule::kNone:
      return "fovea::cuda::DropoutRule::kNone";
    case DropoutRule::kFovea:
      return "fovea::cuda::DropoutRule::kFovea";
    case DropoutRule::kTorchMemEfficient:
      return "fovea::cuda::DropoutRule::kTorchMemEfficient";
  }
  return "";
}

}  // namespace

std::string print(const Spec& spec) {
  std::string fields;
  for_each_field(spec, [&](std::string_view name, const auto& value, const auto& usual) {
    if (value != usual) {
      fields += fmt::format("{}.{} = {}", fields.empty() ? "" : ", ", name, value_of(value));
    }
  });
  return "fovea::cuda::Spec{" + fields + "}";
}

}  // namespace fovea::cuda
