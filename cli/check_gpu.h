// SPDX-License-Identifier: Apache-2.0
//
// fovea check --device cuda.
#pragma once

#include <string>
#include <vector>

#include "check/cases.h"

namespace fovea::cli {

struct GpuSettings {
  int ordinal = 0;
  int jobs = 0;             // 0: as many as there are cores
  double seconds = 0;       // no row is begun after them; 0: no limit
  double row_seconds = 60;  // a call that takes longer ends the check
  std::string report;       // a file; "": none
  std::string arguments;    // of the command line, for the report
};

// Prints and writes the report. Throws Fault(kCheckFailed) if a row fails, Fault(kUnsupported) if none is computed.
void check_on_gpu(const GpuSettings& settings, const std::vector<check::Case>& rows);

}  // namespace fovea::cli
