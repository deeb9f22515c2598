#include "dovetail/plan/element_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/plan/unit_preference.h"

namespace dovetail::plan {
namespace {

// Of a request: times the largest degree this stays within 64 bits.
constexpr int64_t kMostElements = int64_t{1} << 44;

void check_tensor(const LayoutTensor& t) {
  if (t.numel < 0 || t.numel > kMostElements || t.block < 1 ||
      t.block > std::max<int64_t>(1, t.numel))
    raise<ConfigError>(
        "{}: wanted a number of elements >= 0 and a block from 1 to that number; got {} and {}",
        t.name, t.numel, t.block);
  const auto& e = t.unit_edges;
  if (e.empty()) return;
  if (e.front() != 0 || e.back() != t.numel ||
      std::adjacent_find(e.begin(), e.end(), std::greater_equal<>()) != e.end())
    raise<ConfigError>("{}: unit edges must ascend from 0 to {}; got {} of them from {} to {}",
                       t.name, t.numel, e.size(), e.front(), e.back());
}

// Length of the evenly spaced units; the last may be short.
int64_t unit_length(const LayoutTensor& t) {
  if (t.unit_edges.size() < 2) return 1;
  const int64_t length = t.unit_edges[1];
  for (size_t i = 1; i + 1 < t.unit_edges.size(); ++i)
    if (t.unit_edges[i] != length * static_cast<int64_t>(i))
      raise<ConfigError>(
          "{}: boundaries on units only, but its units are not evenly spaced (edge {} at {}, "
          "wanted {})",
          t.name, i, t.unit_edges[i], length * static_cast<int64_t>(i));
  return length;
}

RaggedTensor in_units(const LayoutTensor& t, int64_t block, int64_t alignment) {
  const int64_t extent = ceil_div(t.numel, alignment);
  const int64_t per_block =
      block / std::gcd(block, alignment);  // lcm(block, alignment) / alignment
  return {extent, std::clamp<int64_t>(per_block, 1, std::max<int64_t>(1, extent))};
}

SegmentLayout in_elements(const LayoutRequest& request, const RaggedSegment& s) {
  const int64_t a = request.alignment;
  SegmentLayout r{.zero1 = request.degrees.zero1,
                  .zero2 = request.degrees.zero2,
                  .zero3 = request.degrees.zero3,
                  .shard1 = s.shard1 * a,
                  .shard2 = s.shard2 * a,
                  .shard3 = s.shard3 * a,
                  .bound = s.bound3 * a,
                  .placements = {}};
  for (const RaggedPlacement& p : s.placements) {
    const LayoutTensor& t = request.tensors[p.tensor];
    r.placements.push_back({p.tensor, p.offset * a, t.numel, t.block});
  }
  return r;
}

}  // namespace

int64_t ElementLayout::shard3() const {
  return std::accumulate(segments.begin(), segments.end(), int64_t{0},
                         [](int64_t n, const auto& s) { return n + s.shard3; });
}

int64_t ElementLayout::shard1() const {
  return std::accumulate(segments.begin(), segments.end(), int64_t{0},
                         [](int64_t n, const auto& s) { return n + s.shard1; });
}

RaggedProblem problem_of(const LayoutRequest& request) {
  if (request.alignment < 1 || request.alignment > kMostElements)
    raise<ConfigError>("alignment: wanted at least 1 element; got {}", request.alignment);
  RaggedProblem p{{}, request.degrees, request.max_segments, request.weights};
  p.tensors.reserve(request.tensors.size());
  int64_t units = 0;
  for (const LayoutTensor& t : request.tensors) {
    check_tensor(t);
    int64_t block = t.block;
    if (request.boundary == Boundary::unit) {
      const int64_t unit = unit_length(t);
      const int64_t factor = block / std::gcd(block, unit);
      block = factor > t.numel / unit ? std::max<int64_t>(1, t.numel) : factor * unit;
    }
    p.tensors.push_back(in_units(t, block, request.alignment));
    units += p.tensors.back().extent;
    if (units > kMostElements / request.alignment)
      raise<ConfigError>("{}: the tensors add up to more than {} elements", t.name, kMostElements);
  }
  return p;
}

ElementLayout lay_out(const LayoutRequest& request) {
  const RaggedProblem problem = problem_of(request);
  RaggedPlan plan = plan_ragged(problem);
  UnitEdges units{request.alignment, {}};
  for (const LayoutTensor& t : request.tensors) units.edges.push_back(t.unit_edges);
  ElementLayout r{
      {}, plan.bound3 * request.alignment, plan.bound1 * request.alignment, plan.exact, plan.steps,
      0};
  for (RaggedSegment& s : plan.segments) prefer_unit_edges(problem, units, s);
  verify(problem, plan.segments);
  for (const RaggedSegment& s : plan.segments) {
    if (s.shard2 > 0) r.exchanged += exchanged_elements(s, units);
    r.segments.push_back(in_elements(request, s));
    dovetail::verify(r.segments.back());
  }
  return r;
}

}  // namespace dovetail::plan
