// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend against the reference over the case table, with every instruction set that this machine has forced in
// turn, and read back from inside the kernels; the same bits for any number of threads; what the table does not reach.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "check/run.h"
#include "cpu/cpu.h"
#include "cpu/schedule.h"

namespace fovea {
namespace {

class ForcedIsa {
 public:
  explicit ForcedIsa(const std::string& name) { setenv("FOVEA_CPU_ISA", name.c_str(), 1); }
  ~ForcedIsa() { unsetenv("FOVEA_CPU_ISA"); }
  ForcedIsa(const ForcedIsa&) = delete;
  ForcedIsa& operator=(const ForcedIsa&) = delete;
};

TEST(Cpu, CaseTable) {
  for (const check::Case& c : check::cases(check::table_of_environment())) {
    const check::Trial trial(c);
    for (const cpu::Isa& isa : cpu::instruction_sets()) {
      if (!isa.available) {
        continue;
      }
      const ForcedIsa forced(isa.name);
      const check::Outcome outcome = trial.test("cpu");
      EXPECT_TRUE(outcome.passed()) << isa.name << ": " << check::to_text(c) << "\n" << check::to_text(outcome);
      EXPECT_EQ(cpu::last_isa(), isa.name);
    }
  }
}

}  // namespace
}  // namespace fovea
