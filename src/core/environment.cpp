// SPDX-License-Identifier: Apache-2.0
#include "core/environment.h"

#include <cstdlib>

namespace fovea {
namespace {

Environment read_environment() {
  const auto text = [](const char* value) { return std::string(value == nullptr ? "" : value); };
  return {text(std::getenv("FOVEA_BACKEND")), text(std::getenv("FOVEA_CPU_ISA"))};
}

Environment& stored() {
  static Environment environment = read_environment();
  return environment;
}

}  // namespace

const Environment& environment() { return stored(); }

void read_environment_again() { stored() = read_environment(); }

}  // namespace fovea
