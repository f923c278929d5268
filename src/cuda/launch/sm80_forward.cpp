// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/launcher.h"

namespace fovea::cuda {

void Launcher::forward(std::size_t number) {
  args_.splits = plan_.launches[number].pieces;
  args_.partial_out = region<float>(Region::kPartialOut);
  args_.partial_lse = region<float>(Region::kPartialLse);
  main(number, args_);
}

}  // namespace fovea::cuda
