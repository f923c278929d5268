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

template <class Part>
std::string fields_of(const Part& part);
std::string value_of(const PositionTerms& terms) { return fields_of(terms); }

template <class Part>
std::string fields_of(const Part& part) {
  std::string fields;
  for_each_field(part, [&](std::string_view name, const auto& value, const auto& usual) {
    if (value != usual) {
      fields += fmt::format("{}.{} = {}", fields.empty() ? "" : ", ", name, value_of(value));
    }
  });
  return "{" + fields + "}";
}

// The name of a Spec, and its bases in their order.
std::string text_of(const AroundSpec& spec) { return "AroundSpec" + fields_of(spec); }

template <class... Parts>
std::string text_of(const char* name, const Parts&... parts) {
  std::string text;
  for (const std::string& part : {fields_of(parts)...}) {
    text += (text.empty() ? "" : ", ") + part;
  }
  return fmt::format("{}{{{}}}", name, text);
}
std::string text_of(const ForwardSpec& s) { return text_of<Features, ForwardTiles>("ForwardSpec", s, s); }
std::string text_of(const WideForwardSpec& s) { return text_of<Features, WideForwardTiles>("WideForwardSpec", s, s); }
std::string text_of(const BackwardSpec& s) {
  return text_of<Features, Gradients, BackwardTiles>("BackwardSpec", s, s, s);
}
std::string text_of(const Sm90ForwardSpec& s) { return text_of<Features, Sm90ForwardTiles>("Sm90ForwardSpec", s, s); }
std::string text_of(const Sm90BackwardSpec& s) {
  return text_of<Features, Gradients, Sm90BackwardTiles>("Sm90BackwardSpec", s, s, s);
}
std::string text_of(const Sm90BiasSpec& s) { return text_of<Features, Sm90BiasTiles>("Sm90BiasSpec", s, s); }
std::string text_of(const Sm90SmallSpec& s) { return text_of<Features, Sm90SmallTiles>("Sm90SmallSpec", s, s); }

}  // namespace

std::string print(const Spec& spec) {
  return "fovea::cuda::" + std::visit([](const auto& kind) { return text_of(kind); }, spec);
}

}  // namespace fovea::cuda
