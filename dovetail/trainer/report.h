// RUN/report.html: one self-contained page about a run: what came out, curves, memory, who holds
// what, configuration.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "dovetail/plan/bytes.h"
#include "dovetail/plan/plan.h"

namespace dovetail::trainer {

struct ReportData {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;  // headline figures, in order
  std::vector<nlohmann::json> metrics;                     // lines of metrics.jsonl
  plan::Plan plan;
  std::vector<plan::HeldBytes> held;       // per rank, measured
  std::vector<plan::HeldBytes> predicted;  // per rank, by the plan
  std::string sample;                      // generated text; may be empty
  std::string config;                      // TOML
};

std::string report_html(const ReportData& data);

}  // namespace dovetail::trainer
