// SPDX-License-Identifier: Apache-2.0
//
// What this machine is to fovea: what `fovea explain`, fovea.explain() and a bug report begin with.
#pragma once

#include <string>

namespace fovea {

struct Machine {
  std::string version;    // of the library
  std::string processor;  // as the system calls it
  std::string isa;        // the instruction set in force
  int threads = 0;
};

Machine this_machine();

// The text of fovea_machine().
std::string machine_text();

}  // namespace fovea
