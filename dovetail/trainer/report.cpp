#include "dovetail/trainer/report.h"

#include <fmt/ranges.h>

#include <cmath>

#include "dovetail/trainer/html.h"
#include "dovetail/trainer/shard_map.h"

namespace dovetail::trainer {
namespace {

constexpr const char* kBlue = "#1c7ed6";
constexpr const char* kLightBlue = "#a5d8ff";
constexpr const char* kOrange = "#e8590c";

constexpr const char* kStyle = R"(
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #f8f9fa; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; margin: 8px 0 16px; } h2 { font-size: 18px; margin: 32px 0 8px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 10px; }
.fact { background: #fff; border: 1px solid #dee2e6; border-radius: 8px; padding: 10px 12px; }
.fact b { display: block; font-size: 19px; } .fact span { color: #868e96; font-size: 13px; }
figure { background: #fff; border: 1px solid #dee2e6; border-radius: 8px; margin: 12px 0;
  padding: 10px 12px; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #343a40; }
svg .tick { fill: #495057; font-size: 11px; }
svg .small { font-size: 9.5px; fill: #495057; } svg .grid { stroke: #e9ecef; }
pre { background: #fff; border: 1px solid #dee2e6; border-radius: 8px; padding: 12px;
  overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
table { border-collapse: collapse; background: #fff; font-size: 13px; width: 100%; }
td, th { border: 1px solid #dee2e6; padding: 4px 8px; text-align: right; }
td:first-child, th:first-child { text-align: left; }
details { margin: 8px 0; } summary { cursor: pointer; font-weight: 600; }
)";

Series series(const ReportData& data, const char* key, const char* name, const char* color) {
  Series s{name, color, {}};
  for (const auto& line : data.metrics) {
    const auto it = line.find(key);
    if (it != line.end() && it->is_number())
      s.points.emplace_back(line.value("step", 0.0), it->get<double>());
  }
  return s;
}

// A running mean that forgets over about `span` points.
Series smoothed(const Series& raw, double span, const char* name, const char* color) {
  Series s{name, color, {}};
  double sum = 0, weight = 0;
  const double keep = 1 - 1 / span;
  for (const auto& [x, y] : raw.points) {
    sum = sum * keep + y;
    weight = weight * keep + 1;
    s.points.emplace_back(x, sum / weight);
  }
  return s;
}

std::string loss_chart(const ReportData& data) {
  const Series raw = series(data, "loss", "training", kLightBlue);
  Series validation = series(data, "val_loss", "validation", kOrange);
  validation.dots = true;
  const double span = std::max(1.0, static_cast<double>(raw.points.size()) / 40);
  return to_svg(LineChart{"Loss",
                          "step",
                          "nats per token",
                          {raw, smoothed(raw, span, "training, smoothed", kBlue), validation}});
}

std::string chart(const ReportData& data, const char* key, const char* title, const char* label,
                  bool from_zero) {
  const Series raw = series(data, key, "each step", kLightBlue);
  const double span = std::max(1.0, static_cast<double>(raw.points.size()) / 40);
  return to_svg(
      LineChart{title, "step", label, {raw, smoothed(raw, span, "smoothed", kBlue)}, from_zero});
}

std::vector<double> roles_of(const plan::HeldBytes& h) {
  std::vector<double> values;
  for (int64_t bytes :
       {h.main, h.runtime, h.gradient, h.main_gradient, h.accumulator, h.state + h.unit_state, h.slots,
        h.staging + h.workspace})
    values.push_back(static_cast<double>(bytes));
  return values;
}

std::string memory_chart(const ReportData& data) {
  BarChart bars{"Memory of the engine, by role and rank (measured)",
                {{"main weights", "#1864ab"},
                 {"runtime", "#4dabf7"},
                 {"gradient", "#f08c00"},
                 {"main gradient", "#ffd43b"},
                 {"accumulator", "#e64980"},
                 {"optimizer state", "#2f9e44"},
                 {"slots", "#adb5bd"},
                 {"units of the update", "#7950f2"}},
                {}};
  for (size_t rank = 0; rank < data.held.size(); ++rank)
    bars.bars.push_back({fmt::format("rank {}", rank), roles_of(data.held[rank])});
  std::string out = to_svg(bars);
  size_t equal = 0;
  for (size_t rank = 0; rank < data.held.size(); ++rank)
    equal += data.held[rank] == data.predicted[rank];
  return out +
         fmt::format("<p>Equal to the plan's prediction, byte for byte, on {} of {} ranks.</p>",
                     equal, data.held.size());
}

std::string tensor_table(const plan::Plan& plan) {
  std::string rows;
  const auto mains =
      plan::rank_groups(plan.options.degrees, plan.options.world, plan::RankGroup::main);
  for (const plan::GroupPlan& group : plan.groups)
    for (const plan::BucketPlan& bucket : group.buckets)
      for (const SegmentLayout& layout : bucket.segments)
        for (const Placement& p : layout.placements) {
          const TensorSpec& tensor = plan.tensors[static_cast<size_t>(p.tensor)];
          std::string held;
          for (int64_t q = 0; q < layout.zero1; ++q) {
            const Interval part = intersect(p.interval(), layout.zero1_interval(q));
            if (part.empty()) continue;
            held += fmt::format("{}rank {}: {} to {}", held.empty() ? "" : "; ",
                                mains[0][static_cast<size_t>(q)], part.begin - p.offset,
                                part.end - p.offset);
          }
          rows += fmt::format("<tr><td>{}</td><td>[{}]</td><td>{}</td></tr>",
                              escape_html(tensor.name), fmt::join(tensor.shape, ", "), held);
        }
  return "<details><summary>Every tensor</summary><table><tr><th>tensor</th><th>shape</th>"
         "<th>elements held (first copy)</th></tr>" +
         rows + "</table></details>";
}

}  // namespace

std::string report_html(const ReportData& data) {
  std::string facts;
  for (const auto& [name, value] : data.facts)
    facts += fmt::format("<div class='fact'><b>{}</b><span>{}</span></div>", escape_html(value),
                         escape_html(name));
  std::string body =
      fmt::format("<h1>{}</h1><div class='facts'>{}</div>", escape_html(data.title), facts);
  body += "<h2>Training</h2>" + loss_chart(data);
  body += chart(data, "step_ms", "Step time", "ms", true);
  body += chart(data, "grad_norm", "Gradient norm", "before clipping", true);
  body += chart(data, "lr", "Learning rate", "", true);
  body += "<h2>Memory</h2>" + memory_chart(data);
  body += "<h2>Shards</h2>" + shard_map_svg(data.plan) + tensor_table(data.plan);
  if (!data.sample.empty()) body += "<h2>Sample</h2><pre>" + escape_html(data.sample) + "</pre>";
  body += "<h2>Configuration</h2><details><summary>config.toml</summary><pre>" +
          escape_html(data.config) + "</pre></details>";
  return fmt::format(
      "<!doctype html>\n<html lang='en'><head><meta "
      "charset='utf-8'><title>{}</title><style>{}</style>"
      "</head><body><main>{}</main></body></html>\n",
      escape_html(data.title), kStyle, body);
}

}  // namespace dovetail::trainer
