#include "dovetail/trainer/trace_report.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

namespace dovetail::trainer {
namespace {

nlohmann::json event_of(const TraceSpan& span, int rank) {
  return {{"name", span.name},
          {"cat", name_of(span.doing)},
          {"ph", "X"},
          {"pid", rank},
          {"tid", 0},
          {"ts", static_cast<double>(span.begin) * 1e-3},
          {"dur", static_cast<double>(span.end - span.begin) * 1e-3}};
}

std::string row_of(const std::string& title, const std::array<double, kDoings>& milliseconds) {
  double step = 0;
  std::string row = fmt::format("{:<8}", title);
  for (double ms : milliseconds) {
    row += fmt::format("{:>10.1f}", ms);
    step += ms;
  }
  return row + fmt::format("{:>10.1f}\n", step);
}

}  // namespace

TraceReport report_trace(const Trace& trace, int64_t steps, comm::Group& world) {
  const comm::Identity id{.label = "trace"};
  nlohmann::json events = nlohmann::json::array();
  events.push_back({{"name", "process_name"},
                    {"ph", "M"},
                    {"pid", world.rank()},
                    {"args", {{"name", fmt::format("rank {}", world.rank())}}}});
  for (const TraceSpan& span : trace.spans()) events.push_back(event_of(span, world.rank()));
  const std::string mine = events.dump();
  const auto texts = world.gather_bytes(std::as_bytes(std::span(mine)), id);
  const auto totals = trace.totals();
  const auto numbers = world.gather_bytes(std::as_bytes(std::span(totals)), id);
  if (world.rank() != 0) return {};

  TraceReport report;
  report.json = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  for (size_t r = 0; r < texts.size(); ++r) {
    const std::string_view text(reinterpret_cast<const char*>(texts[r].data()), texts[r].size());
    if (r > 0) report.json += ",\n";
    report.json += text.substr(1, text.size() - 2);  // without the brackets
  }
  report.json += "]}\n";

  report.table = fmt::format("{:<8}", "ms/step");
  for (int k = 0; k < kDoings; ++k) report.table += fmt::format("{:>10}", name_of(static_cast<Doing>(k)));
  report.table += fmt::format("{:>10}\n", "step");
  std::array<double, kDoings> mean{};
  for (size_t r = 0; r < numbers.size(); ++r) {
    std::array<int64_t, kDoings> own{};
    std::memcpy(own.data(), numbers[r].data(), sizeof own);
    std::array<double, kDoings> ms{};
    for (int k = 0; k < kDoings; ++k) {
      ms[k] = static_cast<double>(own[k]) * 1e-6 / static_cast<double>(steps);
      mean[k] += ms[k] / static_cast<double>(numbers.size());
    }
    report.table += row_of(fmt::format("rank {}", r), ms);
  }
  if (numbers.size() > 1) report.table += row_of("mean", mean);
  return report;
}

}  // namespace dovetail::trainer
