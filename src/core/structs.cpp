// SPDX-License-Identifier: Apache-2.0
#include "core/structs.h"

namespace fovea {
Structs::Structs(const fovea_problem& given, Direction direction) : given_(given) {
  const auto is_own = [](const auto& argument_struct) { return argument_struct.size == sizeof(argument_struct); };
  if (is_own(given)) {
    const Arguments arguments = arguments_of(given, direction);
    if (std::all_of(arguments.begin(), arguments.end(),
                    [&](const Argument& argument) { return is_own(*(given.*argument.tensor)); })) {
      return;
    }
  }
  own_ = std::make_unique<Own>();
  fovea_problem& problem = own_->problem;
  problem = copied("problem", "fovea_problem", offsetof(fovea_problem, bias), given);
  fovea_tensor* next = own_->tensors.data();
  for (const Argument& argument : arguments_of(problem, direction)) {
    *next = copied(argument.name, "fovea_tensor", sizeof(fovea_tensor), *(problem.*argument.tensor));
    problem.*argument.tensor = next++;
  }
}

}  // namespace fovea
