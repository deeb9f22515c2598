// Bits of HTML and SVG for self-contained reports: nothing in them is fetched from anywhere.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dovetail::trainer {

std::string escape_html(std::string_view text);

// 1234567 bytes -> "1.18 MiB"
std::string human_bytes(double bytes);
// 75.2 -> "1:15", 3675 -> "1:01:15"
std::string human_seconds(double seconds);

struct Series {
  std::string name;
  std::string color;
  std::vector<std::pair<double, double>>
      points;         // ascending in x; those that are not finite are left out
  bool dots = false;  // mark the points
};

struct LineChart {
  std::string title;
  std::string x_label, y_label;
  std::vector<Series> series;
  bool from_zero = false;  // the y axis starts at 0
};
std::string to_svg(const LineChart& chart);

// Horizontal bars, each of several parts.
struct BarChart {
  std::string title;
  std::vector<std::pair<std::string, std::string>> parts;  // name and color, in order
  struct Bar {
    std::string name;
    std::vector<double> values;  // bytes, one per part
  };
  std::vector<Bar> bars;
};
std::string to_svg(const BarChart& chart);

}  // namespace dovetail::trainer
