#include "dovetail/trainer/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace dovetail::trainer {
namespace {

constexpr double kWidth = 860, kHeight = 280, kLeft = 64, kRight = 16, kTop = 34, kBottom = 40;

struct Axis {
  double low = 0, high = 1, step = 1;
};

// At most about `ticks` round steps that cover [low, high].
Axis axis_of(double low, double high, int ticks) {
  if (!(high > low)) high = low + (low == 0 ? 1 : std::abs(low) * 0.1);
  const double raw = (high - low) / ticks;
  const double magnitude = std::pow(10.0, std::floor(std::log10(raw)));
  double step = magnitude;
  for (double factor : {1.0, 2.0, 5.0, 10.0}) {
    step = factor * magnitude;
    if (step >= raw) break;
  }
  return {std::floor(low / step) * step, std::ceil(high / step) * step, step};
}

std::vector<std::pair<double, double>> thinned(const Series& series) {
  std::vector<std::pair<double, double>> points;
  for (const auto& p : series.points)
    if (std::isfinite(p.first) && std::isfinite(p.second)) points.push_back(p);
  constexpr size_t kMost = 900;
  if (points.size() <= kMost) return points;
  std::vector<std::pair<double, double>> kept;
  for (size_t i = 0; i < kMost; ++i) kept.push_back(points[i * (points.size() - 1) / (kMost - 1)]);
  return kept;
}

std::string legend(const std::vector<std::pair<std::string, std::string>>& entries, double x,
                   double y) {
  std::string out;
  for (const auto& [name, color] : entries) {
    out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='10' height='10' rx='2' fill='{}'/>", x,
                       y - 9, color);
    out += fmt::format("<text x='{:.1f}' y='{:.1f}'>{}</text>", x + 14, y, escape_html(name));
    x += 26 + 6.6 * static_cast<double>(name.size());
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> parts_in_use(const BarChart& chart) {
  std::vector<std::pair<std::string, std::string>> parts;
  for (size_t i = 0; i < chart.parts.size(); ++i)
    for (const auto& bar : chart.bars)
      if (bar.values[i] > 0) {
        parts.push_back(chart.parts[i]);
        break;
      }
  return parts;
}

struct Frame {
  Axis x, y;
  double px(double v) const {
    return kLeft + (v - x.low) / (x.high - x.low) * (kWidth - kLeft - kRight);
  }
  double py(double v) const {
    return kHeight - kBottom - (v - y.low) / (y.high - y.low) * (kHeight - kTop - kBottom);
  }
};

std::string grid(const Frame& f, const LineChart& chart) {
  std::string out;
  for (double v = f.y.low; v <= f.y.high + f.y.step / 2; v += f.y.step)
    out += fmt::format(
        "<line class='grid' x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}'/>"
        "<text class='tick' text-anchor='end' x='{3}' y='{4:.1f}'>{5:.6g}</text>",
        kLeft, kWidth - kRight, f.py(v), kLeft - 6, f.py(v) + 4,
        std::abs(v) < f.y.step / 2 ? 0 : v);
  for (double v = f.x.low; v <= f.x.high + f.x.step / 2; v += f.x.step)
    out += fmt::format("<text class='tick' text-anchor='middle' x='{:.1f}' y='{}'>{:.6g}</text>",
                       f.px(v), kHeight - kBottom + 16, std::abs(v) < f.x.step / 2 ? 0 : v);
  out += fmt::format("<text class='tick' text-anchor='middle' x='{}' y='{}'>{}</text>",
                     (kLeft + kWidth - kRight) / 2, kHeight - 6, escape_html(chart.x_label));
  out += fmt::format("<text class='tick' x='{}' y='{}'>{}</text>", 6, kTop - 8,
                     escape_html(chart.y_label));
  return out;
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string human_bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (std::abs(bytes) >= 1024 && unit < 4) bytes /= 1024, ++unit;
  return unit == 0 ? fmt::format("{:.0f} B", bytes)
                   : fmt::format("{:.{}f} {}", bytes, bytes < 100 ? 2 : 0, units[unit]);
}

std::string human_seconds(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string to_svg(const LineChart& chart) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double x0 = kInfinity, x1 = -kInfinity, y0 = kInfinity, y1 = -kInfinity;
  std::vector<std::pair<std::string, std::string>> names;
  std::vector<std::vector<std::pair<double, double>>> lines;
  for (const Series& s : chart.series) {
    lines.push_back(thinned(s));
    if (lines.back().empty()) continue;
    names.emplace_back(s.name, s.color);
    for (const auto& [x, y] : lines.back())
      x0 = std::min(x0, x), x1 = std::max(x1, x), y0 = std::min(y0, y), y1 = std::max(y1, y);
  }
  std::string out =
      fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {} {}' role='img'>",
                  escape_html(chart.title), kWidth, kHeight);
  if (names.empty()) return out + "<text x='64' y='60'>no data</text></svg></figure>";
  Frame frame{axis_of(x0, x1, 8), axis_of(chart.from_zero ? 0 : y0, y1, 5)};
  frame.x.high = std::max(x1, frame.x.low + frame.x.step);
  out += grid(frame, chart);
  for (size_t i = 0; i < lines.size(); ++i) {
    std::string path;
    for (const auto& [x, y] : lines[i])
      path += fmt::format("{:.1f},{:.1f} ", frame.px(x), frame.py(y));
    out += fmt::format("<polyline fill='none' stroke='{}' stroke-width='1.6' points='{}'/>",
                       chart.series[i].color, path);
    if (!chart.series[i].dots) continue;
    for (const auto& [x, y] : lines[i])
      out += fmt::format(
          "<circle cx='{:.1f}' cy='{:.1f}' r='3.2' fill='{}'><title>{:.6g}: "
          "{:.5g}</title></circle>",
          frame.px(x), frame.py(y), chart.series[i].color, x, y);
  }
  return out + legend(names, kLeft + 120, kTop - 12) + "</svg></figure>";
}

std::string to_svg(const BarChart& chart) {
  constexpr double kRow = 30, kName = 90, kValue = 90;
  double longest = 1;
  for (const auto& bar : chart.bars) {
    double sum = 0;
    for (double v : bar.values) sum += v;
    longest = std::max(longest, sum);
  }
  const double height = kTop + kRow * static_cast<double>(chart.bars.size()) + 8;
  std::string out =
      fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {} {:.0f}' role='img'>",
                  escape_html(chart.title), kWidth, height);
  out += legend(parts_in_use(chart), kName, 16);
  double y = kTop;
  for (const auto& bar : chart.bars) {
    double x = kName, sum = 0;
    out += fmt::format("<text class='tick' text-anchor='end' x='{}' y='{:.1f}'>{}</text>",
                       kName - 8, y + 15, escape_html(bar.name));
    for (size_t i = 0; i < bar.values.size(); ++i) {
      const double width = bar.values[i] / longest * (kWidth - kName - kValue);
      out += fmt::format(
          "<rect x='{:.2f}' y='{:.1f}' width='{:.2f}' height='{}' fill='{}'><title>{}: "
          "{}</title></rect>",
          x, y, width, kRow - 9, chart.parts[i].second, escape_html(chart.parts[i].first),
          human_bytes(bar.values[i]));
      x += width;
      sum += bar.values[i];
    }
    out += fmt::format("<text class='tick' x='{:.1f}' y='{:.1f}'>{}</text>", x + 6, y + 15,
                       human_bytes(sum));
    y += kRow;
  }
  return out + "</svg></figure>";
}

}  // namespace dovetail::trainer
