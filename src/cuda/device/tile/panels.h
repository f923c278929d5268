// SPDX-License-Identifier: Apache-2.0
//
// Panels: a tile in shared memory is cut into panels of 64, 32 or 16 columns of 16-bit numbers, whose rows of 128, 64
// or 32 bytes the hardware swizzles. The host makes the boxes of tensor maps from the same widths as the kernels.
#pragma once

namespace fovea::cuda {

// Columns of the widest panel that divides a tile.
constexpr int panel_columns(int columns) { return columns % 64 == 0 ? 64 : columns % 32 == 0 ? 32 : 16; }

// The same, but a tile of more than 16 columns has no panels of 16, which are slow: its last panel of 64 is not full.
// The rest costs shared memory alone.
constexpr int wide_panel_columns(int columns) {
  return columns % 32 != 0 && columns > 32 ? 64 : panel_columns(columns);
}

// Panels of a tile, the last of which need not be full.
constexpr int panels_of(int columns, int panel) { return (columns + panel - 1) / panel; }

}  // namespace fovea::cuda
