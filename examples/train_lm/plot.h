// SPDX-License-Identifier: Apache-2.0
//
// Two pictures of the same curves: an SVG file, and a few lines of text for the terminal.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace train_lm {

struct Point {
  double x = 0;
  double y = 0;
};

struct Curve {
  std::string name;
  std::vector<Point> points;
};

// A horizontal line to compare the curves with.
struct Level {
  std::string name;
  double y = 0;
};

struct Figure {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<Curve> curves;
  std::vector<Level> levels;
};

std::string to_svg(const Figure& figure);

// `columns` by `rows` characters, axes included. Curve n is drawn with its name's first letter.
std::string to_text(const Figure& figure, int columns, int rows);

}  // namespace train_lm
