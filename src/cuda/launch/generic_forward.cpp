// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the generic forwards and of what puts the parts of split keys together.
#include "cuda/launch/launcher.h"

namespace fovea::cuda {

void Launcher::forward(std::size_t number) {
  args_.splits = plan_.launches[number].pieces;
  args_.partial_out = region<float>(Region::kPartialOut);
  args_.partial_sum = region<float>(Region::kPartialSum);
  main(number, args_);
}

}  // namespace fovea::cuda
