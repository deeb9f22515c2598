#include "dovetail/plan/ragged.h"

#include <algorithm>
#include <numeric>

#include "dovetail/base/error.h"
#include "dovetail/plan/segments.h"

namespace dovetail::plan {
namespace {

void check_problem(const RaggedProblem& p) {
  validate(p.degrees, p.degrees.zero1);
  if (p.max_segments < 1 || p.max_segments > 3)
    raise<ConfigError>("segments: wanted 1, 2 or 3; got {}", p.max_segments);
  if (p.weights.zero3 < 1 || p.weights.zero1 < 1)
    raise<ConfigError>("weights: wanted at least 1 each; got {} and {}", p.weights.zero3,
                       p.weights.zero1);
  constexpr int64_t kMost = int64_t{1} << 44;  // units; times the most ranks within 64 bits
  constexpr int64_t kMostRanks = int64_t{1} << 18;
  if (p.degrees.zero1 > kMostRanks)
    raise<ConfigError>("degrees: zero1 {} is beyond the {} that are planned for", p.degrees.zero1,
                       kMostRanks);
  int64_t total = 0;
  for (size_t i = 0; i < p.tensors.size(); ++i) {
    const RaggedTensor& t = p.tensors[i];
    if (t.extent < 0 || t.block < 1 || t.block > std::max<int64_t>(1, t.extent))
      raise<ConfigError>(
          "tensor {}: wanted an extent >= 0 and a block from 1 to the extent; got extent {}, block "
          "{}",
          i, t.extent, t.block);
    if (t.extent > kMost - total)
      raise<ConfigError>("tensor {}: the extents add up to more than {} units", i, kMost);
    total += t.extent;
  }
}

RaggedSegment place(const RaggedProblem& problem, const SegmentChoice& choice,
                    std::span<const int> chosen) {
  RaggedSegment s;
  s.shard2 = choice.order.empty() ? 0 : choice.grid.period;
  s.shard1 = choice.order.empty() ? 0 : choice.grid.step;
  s.shard3 = s.shard2 * (problem.degrees.zero2 / problem.degrees.zero3);
  s.bound3 = choice.bounds.shard2 * (problem.degrees.zero2 / problem.degrees.zero3);
  for (int i : chosen)
    if (problem.tensors[i].extent == 0) s.placements.push_back({i, 0});
  int64_t end = 0;
  for (int i : choice.order) {
    const int64_t x = choice.grid.earliest_start(end, problem.tensors[i]);
    DT_CHECK_LE(0, x, "tensor {} of a found order fits nowhere", i);
    s.placements.push_back({i, x});
    end = x + problem.tensors[i].extent;
  }
  return s;
}

}  // namespace

int64_t RaggedPlan::shard3() const {
  return std::accumulate(segments.begin(), segments.end(), int64_t{0},
                         [](int64_t n, const auto& s) { return n + s.shard3; });
}

int64_t RaggedPlan::shard1() const {
  return std::accumulate(segments.begin(), segments.end(), int64_t{0},
                         [](int64_t n, const auto& s) { return n + s.shard1; });
}

RaggedPlan plan_ragged(const RaggedProblem& problem) {
  check_problem(problem);
  const SegmentsChoice choice = choose_segments(problem);
  RaggedPlan plan;
  for (const SegmentPart& part : choice.parts)
    plan.segments.push_back(place(problem, part.choice, part.tensors));
  plan.exact = choice.exact;
  plan.bound3 = choice.exact ? plan.shard3() : choice.bound3;
  plan.bound1 = choice.exact ? plan.shard1() : choice.bound1;
  plan.steps = choice.steps;
  verify(problem, plan.segments);
  return plan;
}

}  // namespace dovetail::plan
