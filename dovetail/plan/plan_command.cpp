#include "dovetail/plan/plan_command.h"

#include <chrono>

#include "dovetail/plan/instance.h"
#include "dovetail/plan/inventory.h"
#include "dovetail/plan/model_report.h"

namespace dovetail::plan {
namespace {

std::string plan_instance(const PlanCommand& c) {
  const RaggedProblem problem = read_instance(c.instance);
  const auto start = std::chrono::steady_clock::now();
  const RaggedPlan plan = plan_ragged(problem);
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return c.json ? instance_json(problem, plan, ms) : instance_text(problem, plan, ms);
}

}  // namespace

std::string run_plan_command(const PlanCommand& c) {
  if (!c.instance.empty()) return plan_instance(c);
  ModelLayoutOptions options;
  options.degrees.zero1 = c.zero1;
  options.degrees.zero3 = c.zero3 != 0 ? c.zero3 : c.zero1;
  options.degrees.zero2 = c.zero2 != 0 ? c.zero2 : options.degrees.zero3;
  options.block = parse_block_kind(c.block);
  options.alignment = c.alignment;
  options.max_segments = c.segments;
  options.orient = c.orient;
  const ModelLayout model = lay_out_model(read_inventory(c.model), options);
  return c.json ? model_json(model, options) : model_text(model, options);
}

}  // namespace dovetail::plan
