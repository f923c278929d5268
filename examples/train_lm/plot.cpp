// SPDX-License-Identifier: Apache-2.0
#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>

namespace train_lm {
namespace {

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  // Where a value lies between the ends, 0 to 1.
  double share(double value) const { return high > low ? std::clamp((value - low) / (high - low), 0.0, 1.0) : 0.5; }
};

struct Ranges {
  Range x, y;
};

Ranges ranges_of(const Figure& figure) {
  Ranges ranges;
  ranges.x.include(0);
  for (const Curve& curve : figure.curves) {
    for (const Point& point : curve.points) {
      ranges.x.include(point.x);
      ranges.y.include(point.y);
    }
  }
  for (const Level& level : figure.levels) {
    ranges.y.include(level.y);
  }
  return ranges;
}

// The round numbers within a range, about `count` of them: multiples of 1, 2 or 5 times a power of ten.
std::vector<double> ticks(const Range& range, int count) {
  const double rough = (range.high - range.low) / count;
  if (!(rough > 0)) {
    return {range.low};
  }
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double ratio = rough / power;
  const double step = power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
  std::vector<double> marks;
  for (double n = std::ceil(range.low / step); n * step <= range.high + step * 1e-9; ++n) {
    marks.push_back(n * step);
  }
  return marks;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

}  // namespace

std::string to_svg(const Figure& figure) {
  constexpr double kWidth = 760;
  constexpr double kHeight = 440;
  constexpr double kLeft = 60;
  constexpr double kRight = 20;
  constexpr double kTop = 40;
  constexpr double kBottom = 50;
  constexpr std::array<const char*, 5> kColors = {"#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700"};
  const Ranges ranges = ranges_of(figure);
  const auto x_of = [&](double x) { return kLeft + ranges.x.share(x) * (kWidth - kLeft - kRight); };
  const auto y_of = [&](double y) { return kHeight - kBottom - ranges.y.share(y) * (kHeight - kTop - kBottom); };

  std::string svg;
  auto out = std::back_inserter(svg);
  fmt::format_to(out,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" font-family=\"sans-serif\" "
                 "font-size=\"12\">\n<rect width=\"{0:g}\" height=\"{1:g}\" fill=\"white\"/>\n"
                 "<text x=\"{2:g}\" y=\"22\" font-size=\"15\">{3}</text>\n",
                 kWidth, kHeight, kLeft, escaped(figure.title));
  for (const double y : ticks(ranges.y, 6)) {
    fmt::format_to(out,
                   "<line x1=\"{:g}\" x2=\"{:g}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>"
                   "<text x=\"{:g}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>\n",
                   kLeft, kWidth - kRight, y_of(y), y_of(y), kLeft - 6, y_of(y) + 4, y);
  }
  for (const double x : ticks(ranges.x, 8)) {
    fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{:g}\" text-anchor=\"middle\">{:g}</text>\n", x_of(x),
                   kHeight - kBottom + 16, x);
  }
  fmt::format_to(out, "<text x=\"{:g}\" y=\"{:g}\" text-anchor=\"middle\">{}</text>\n", (kLeft + kWidth - kRight) / 2,
                 kHeight - 12, escaped(figure.x_label));
  fmt::format_to(out, "<text transform=\"translate(16 {:g}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
                 kHeight / 2, escaped(figure.y_label));
  for (const Level& level : figure.levels) {
    fmt::format_to(out,
                   "<line x1=\"{0:g}\" x2=\"{1:g}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"#555\" "
                   "stroke-dasharray=\"5 4\"/><text x=\"{1:g}\" y=\"{3:.1f}\" text-anchor=\"end\" fill=\"#555\">{4} "
                   "{5:.3f}</text>\n",
                   kLeft, kWidth - kRight, y_of(level.y), y_of(level.y) - 5, escaped(level.name), level.y);
  }
  for (std::size_t n = 0; n < figure.curves.size(); ++n) {
    const char* color = kColors[n % kColors.size()];
    fmt::format_to(out, "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\" points=\"", color);
    for (const Point& point : figure.curves[n].points) {
      fmt::format_to(out, "{:.1f},{:.1f} ", x_of(point.x), y_of(point.y));
    }
    fmt::format_to(out, "\"/>\n<text x=\"{:g}\" y=\"{:g}\" text-anchor=\"end\" fill=\"{}\">{}</text>\n",
                   kWidth - kRight - 8, kTop + 16 * static_cast<double>(n + 1), color, escaped(figure.curves[n].name));
  }
  svg += "</svg>\n";
  return svg;
}

std::string to_text(const Figure& figure, int columns, int rows) {
  constexpr int kMargin = 8;
  const Ranges ranges = ranges_of(figure);
  const int width = columns - kMargin;
  const int height = rows - 2;
  std::vector<std::string> canvas(height, std::string(width, ' '));
  const auto column_of = [&](double x) { return static_cast<int>(std::lround(ranges.x.share(x) * (width - 1))); };
  const auto row_of = [&](double y) { return static_cast<int>(std::lround((1 - ranges.y.share(y)) * (height - 1))); };
  for (const Level& level : figure.levels) {
    std::string& line = canvas[row_of(level.y)];
    std::fill(line.begin(), line.end(), '-');
    const std::string label = " " + level.name + " ";
    if (static_cast<int>(label.size()) < width) {
      line.replace(line.size() - label.size() - 1, label.size(), label);
    }
  }
  for (const Curve& curve : figure.curves) {
    for (std::size_t n = 0; n + 1 < curve.points.size(); ++n) {
      const Point from = curve.points[n];
      const Point to = curve.points[n + 1];
      for (int column = column_of(from.x); column <= column_of(to.x); ++column) {
        const double x = ranges.x.low + (ranges.x.high - ranges.x.low) * column / (width - 1);
        const double share = to.x > from.x ? std::clamp((x - from.x) / (to.x - from.x), 0.0, 1.0) : 0.0;
        canvas[row_of(from.y + (to.y - from.y) * share)][column] = curve.name.front();
      }
    }
  }
  std::vector<std::string> labels(height, std::string(kMargin - 1, ' '));
  for (const double y : ticks(ranges.y, height / 3)) {
    labels[row_of(y)] = fmt::format("{:>6.4g} ", y);
  }
  std::string text;
  for (int row = 0; row < height; ++row) {
    text += labels[row] + "|" + canvas[row] + "\n";
  }
  text += std::string(kMargin - 1, ' ') + "+" + std::string(width, '-') + "\n";
  text += fmt::format("{:{}}{:<{}.4g}{:.4g} {}\n", "", kMargin, ranges.x.low,
                      std::max(1, width - 8 - static_cast<int>(figure.x_label.size())), ranges.x.high, figure.x_label);
  return text;
}

}  // namespace train_lm
