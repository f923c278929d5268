// SPDX-License-Identifier: Apache-2.0
//
// The environment variables that choose the backend and the instruction set. They are read once, by the first call that
// needs one: getenv() beside another thread's setenv() is undefined, and a program may have many threads that call
// fovea.
#pragma once

#include <string>

namespace fovea {

struct Environment {
  std::string backend;  // FOVEA_BACKEND: "" or a name, which may be no backend's
  std::string cpu_isa;  // FOVEA_CPU_ISA: the same of instruction sets
};

const Environment& environment();

// Reads them again, for tests and for `fovea check`, which force one choice after the other. No other thread may be in
// a call.
void read_environment_again();

}  // namespace fovea
