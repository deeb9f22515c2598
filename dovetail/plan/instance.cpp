#include "dovetail/plan/instance.h"

#include "dovetail/plan/json_file.h"
#include "dovetail/plan/shard_drawing.h"

namespace dovetail::plan {
namespace {

using nlohmann::json;

RaggedTensor parse_pair(const json& pair, size_t index, const std::string& path) {
  if (!pair.is_array() || pair.size() != 2 || !pair[0].is_number_integer() ||
      !pair[1].is_number_integer())
    raise<FileError>("{}: tensor {}: wanted [extent, block] in whole units; got {}", path, index,
                     pair.dump().substr(0, 60));
  const RaggedTensor t{pair[0].get<int64_t>(), pair[1].get<int64_t>()};
  if (t.extent < 1 || t.block < 1 || t.block > t.extent)
    raise<ConfigError>("{}: tensor {}: wanted 1 <= block <= extent; got extent {}, block {}", path,
                       index, t.extent, t.block);
  return t;
}

double gap_of(const RaggedPlan& plan) {
  return plan.bound1 == 0 ? 0 : double(plan.shard1()) / double(plan.bound1) - 1;
}

}  // namespace

RaggedProblem parse_instance(std::string_view text, const std::string& path) {
  const json object = parse_json(text, path);
  RaggedProblem p;
  p.degrees.zero1 = member<int64_t>(object, "zero1", path, "the instance");
  p.degrees.zero3 = member_or<int64_t>(object, "zero3", p.degrees.zero1, path, "the instance");
  p.degrees.zero2 = member_or<int64_t>(object, "zero2", p.degrees.zero3, path, "the instance");
  p.max_segments = member_or<int>(object, "segments", 1, path, "the instance");
  const json tensors = member<json>(object, "tensors", path, "the instance");
  if (!tensors.is_array()) raise<FileError>("{}: \"tensors\" is no list", path);
  for (const json& pair : tensors) p.tensors.push_back(parse_pair(pair, p.tensors.size(), path));
  return p;
}

RaggedProblem read_instance(const std::string& path) {
  return parse_instance(read_text_file(path), path);
}

std::string instance_json(const RaggedProblem& problem, const RaggedPlan& plan,
                          double milliseconds) {
  json shard1 = json::array(), shard2 = json::array(), shard3 = json::array(),
       placements = json::array();
  for (const RaggedSegment& s : plan.segments) {
    shard1.push_back(s.shard1);
    shard2.push_back(s.shard2);
    shard3.push_back(s.shard3);
    json pairs = json::array();
    for (const RaggedPlacement& p : s.placements) pairs.push_back({p.tensor, p.offset});
    placements.push_back(std::move(pairs));
  }
  return json{{"shard", shard1},         {"shard_zero2", shard2},      {"shard_zero3", shard3},
              {"bound", plan.bound1},    {"bound_zero3", plan.bound3}, {"gap", gap_of(plan)},
              {"exact", plan.exact},     {"steps", plan.steps},        {"ms", milliseconds},
              {"placements", placements}}
             .dump() +
         "\n";
}

std::string instance_text(const RaggedProblem& problem, const RaggedPlan& plan,
                          double milliseconds) {
  std::string out = fmt::format(
      "{} tensors, degrees {}: sum of zero1 shards {} units, zero3 shards {}; proven bounds {} and "
      "{}{}; "
      "{} steps, {:.2f} ms\n",
      problem.tensors.size(), to_text(problem.degrees), plan.shard1(), plan.shard3(), plan.bound1,
      plan.bound3, plan.exact ? " (optimal)" : "", plan.steps, milliseconds);
  for (size_t k = 0; k < plan.segments.size(); ++k) {
    const RaggedSegment& s = plan.segments[k];
    std::vector<DrawnTensor> drawn;
    for (const RaggedPlacement& p : s.placements) {
      const RaggedTensor& t = problem.tensors[p.tensor];
      drawn.push_back(
          {fmt::format("tensor {} ({}, {})", p.tensor, t.extent, t.block), p.offset, t.extent});
    }
    out += fmt::format("segment {}: zero3 shard {}, zero2 shard {}, zero1 shard {} units\n", k,
                       s.shard3, s.shard2, s.shard1);
    out += draw_shards(problem.degrees, {s.shard3, s.shard2, s.shard1}, drawn);
  }
  return out;
}

}  // namespace dovetail::plan
