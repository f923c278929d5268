// SPDX-License-Identifier: Apache-2.0
//
// What this machine is to fovea.
#pragma once

#include <string>

namespace fovea::cli {

struct Machine {
  std::string version;    // of the library
  std::string processor;  // as the system calls it
  std::string isa;        // the instruction set in force
  int threads = 0;
};

Machine this_machine();

}  // namespace fovea::cli
