// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>

#include "cpu/cpu.h"

namespace fovea::cli {

Machine this_machine() {
  Machine machine;
  const int version = fovea_version();
  machine.version = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const std::size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
      machine.processor = begin == line.npos ? "" : line.substr(begin);
      break;
    }
  }
  if (machine.processor.empty()) {
    machine.processor = "an unnamed processor";
  }
  const char* forced = std::getenv("FOVEA_CPU_ISA");
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    if (isa.available && machine.isa.empty()) {
      machine.isa = isa.name;
    }
  }
  if (forced != nullptr && *forced != '\0') {
    machine.isa = forced;
  }
  machine.threads = fovea_num_threads();
  return machine;
}

}  // namespace fovea::cli
