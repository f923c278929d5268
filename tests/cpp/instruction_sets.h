// SPDX-License-Identifier: Apache-2.0
//
// The instruction sets of the CPU backend that this machine runs, and how a test takes one of them.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "cpu/cpu.h"
#include "environment_variable.h"

namespace fovea::testing {

class ForcedIsa : EnvironmentVariable {
 public:
  explicit ForcedIsa(const std::string& name) : EnvironmentVariable("FOVEA_CPU_ISA", name) {}
};

// Says once which are left out.
inline const std::vector<std::string>& available_isas() {
  static const std::vector<std::string> found = [] {
    std::vector<std::string> names;
    for (const cpu::Isa& isa : cpu::instruction_sets()) {
      if (isa.available) {
        names.push_back(isa.name);
      } else {
        std::printf("skipped in all tests, because this machine does not have it: %s\n", isa.name.c_str());
      }
    }
    return names;
  }();
  return found;
}

}  // namespace fovea::testing
