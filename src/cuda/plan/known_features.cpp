// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan/known_features.h"

#include <algorithm>
#include <concepts>
#include <span>
#include <string_view>

namespace fovea::cuda {
namespace {

using Names = std::span<const std::string_view>;

// By the file in which a kernel's scores are made. Generic kernels and sm90_bias_gradient: device/score/scores.cuh.
constexpr std::string_view kOfScores[] = {"arch",       "type",      "d",       "dv",      "banded",   "ragged",
                                          "softcap",    "bias",      "bias2",   "mask",    "key_term", "key_mask",
                                          "query_term", "positions", "shifted", "dropout", "natural",  "fp32_results"};
// device/score/sm90_forward_scores.cuh.
constexpr std::string_view kOfForward[] = {"arch",       "type",      "d",       "dv",      "banded",   "ragged",
                                           "softcap",    "bias",      "bias2",   "mask",    "key_term", "key_mask",
                                           "query_term", "positions", "shifted", "dropout", "natural",  "fp32_results"};
// device/score/sm90_backward_scores.cuh.
constexpr std::string_view kOfBackward[] = {
    "arch", "type",     "d",        "dv",         "banded",    "ragged",  "softcap", "bias",    "bias2",
    "mask", "key_term", "key_mask", "query_term", "positions", "shifted", "dropout", "natural", "fp32_results"};
// device/sm90/small_backward.cuh itself.
constexpr std::string_view kOfSmall[] = {"arch", "type", "d", "dv", "banded", "bias", "natural"};

Names known(const Spec& spec) {
  return std::visit(
      []<class Kind>(const Kind&) -> Names {
        if constexpr (std::same_as<Kind, Sm90ForwardSpec>) {
          return kOfForward;
        } else if constexpr (std::same_as<Kind, Sm90BackwardSpec>) {
          return kOfBackward;
        } else if constexpr (std::same_as<Kind, Sm90SmallSpec>) {
          return kOfSmall;
        } else {
          return kOfScores;
        }
      },
      spec);
}

}  // namespace

const char* unknown_feature(const Kernel& kernel) {
  const Names names = known(kernel.spec);
  const char* found = nullptr;
  std::visit(
      [&]<class Kind>(const Kind& spec) {
        if constexpr (std::derived_from<Kind, Features>) {
          for_each_field(static_cast<const Features&>(spec), [&](const char* name, const auto& value,
                                                                 const auto& usual) {
            if (found == nullptr && !(value == usual) && std::find(names.begin(), names.end(), name) == names.end()) {
              found = name;
            }
          });
        }
      },
      kernel.spec);
  return found;
}

}  // namespace fovea::cuda
