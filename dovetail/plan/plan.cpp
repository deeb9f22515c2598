#include "dovetail/plan/plan.h"

#include <algorithm>
#include <set>

#include "dovetail/base/error.h"
#include "dovetail/plan/element_layout.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::plan {
namespace {

// Far beyond any model, and sums of bytes stay far from overflow.
constexpr int64_t kMostElements = int64_t{1} << 48;

}  // namespace

void validate(const TensorSpec& t) {
  if (t.name.empty()) raise<ConfigError>("tensor: wanted a name, got \"\"");
  int64_t numel = 1;  // counting sizes of 0 as 1, so that no order of multiplication overflows
  for (int64_t d : t.shape) {
    if (d < 0) raise<ConfigError>("{}: wanted sizes of at least 0, got {}", t.name, d);
    if (__builtin_mul_overflow(numel, std::max<int64_t>(1, d), &numel) || numel > kMostElements)
      raise<ConfigError>("{}: wanted at most {} elements, got [{}]", t.name, kMostElements, fmt::join(t.shape, ","));
  }
  if (t.heads < 0 || t.heads_dim < 0)
    raise<ConfigError>("{}: wanted heads and their dimension to be at least 0, got {} and {}", t.name, t.heads,
                       t.heads_dim);
  for (const TensorNodes& n : t.nodes) validate_nodes(t, n);
}

namespace {

void check_groups(const std::vector<GroupSpec>& groups) {
  std::set<std::string_view> group_names, tensor_names;
  for (size_t g = 0; g < groups.size(); ++g) {
    const GroupSpec& group = groups[g];
    if (group.name.empty() && g + 1 != groups.size())
      raise<ConfigError>("groups: wanted the root group last, got it as number {} of {}", g, groups.size());
    if (!group_names.insert(group.name).second) raise<ConfigError>("groups: two are named \"{}\"", group.name);
    if (!group.needs.empty() && group.needs.size() != group.tensors.size())
      raise<ConfigError>("group \"{}\": wanted the needs of {} tensors, got {}", group.name, group.tensors.size(),
                         group.needs.size());
    for (const TensorSpec& t : group.tensors) {
      validate(t);
      if (!tensor_names.insert(t.name).second)
        raise<ConfigError>("{}: a tensor of this name is in the plan already (again in group \"{}\")", t.name,
                           group.name);
    }
  }
}

int64_t block_of(const TensorSpec& t, const UpdateNeeds& needs, const PlanOptions& options, const Format& format) {
  return common_block(t, common_block(t, block_elements(t, options.block), format.block), needs.block);
}

// The layout of tensors[first..] as one bucket.
BucketPlan plan_bucket(const PlanOptions& options, const Format& format, const GroupSpec& group, int64_t first) {
  BucketPlan bucket{format.name, {}};
  LayoutRequest request;
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const TensorSpec& t = group.tensors[i];
    const UpdateNeeds needs = group.needs.empty() ? UpdateNeeds{} : group.needs[i];
    request.tensors.push_back({t.name, t.numel(), block_of(t, needs, options, format),
                               options.boundary == Boundary::any ? std::vector<int64_t>{} : needs.unit_edges});
  }
  if (request.tensors.empty()) return bucket;
  request.degrees = options.degrees;
  request.alignment = options.alignment;
  request.max_segments = options.segments;
  request.boundary = options.boundary;
  bucket.segments = lay_out(request).segments;
  for (SegmentLayout& s : bucket.segments)
    for (Placement& p : s.placements) p.tensor += first;
  return bucket;
}

bool keeps_after_forward(const PlanOptions& options, const std::vector<GroupSpec>& groups, size_t g) {
  const bool has_root = groups.back().name.empty();
  const bool root = has_root && g + 1 == groups.size();
  const bool last = g + 1 + has_root == groups.size();
  const bool by_place = root || last || !options.reshard_after_forward;
  return options.degrees.zero3 == 1 || groups[g].keep_after_forward.value_or(by_place);
}

}  // namespace

void validate(const PlanOptions& o) {
  validate(o.degrees, o.world);
  format_named(o.format);
  if (o.main != DType::f32 && o.main != DType::bf16)
    raise<ConfigError>("main: wanted fp32 or bf16, got {}", name_of(o.main));
  if (o.alignment < 1) raise<ConfigError>("alignment: wanted at least 1 element, got {}", o.alignment);
  if (o.segments < 1 || o.segments > 3) raise<ConfigError>("segments: wanted 1, 2 or 3, got {}", o.segments);
  if (o.prefetch < 0) raise<ConfigError>("prefetch: wanted at least 0 groups, got {}", o.prefetch);
  if (o.pending_reductions < -1)
    raise<ConfigError>("pending_reductions: wanted at least 0, or -1 for what suits, got {}", o.pending_reductions);
  if (o.host_ranks < 1 || o.world % o.host_ranks != 0)
    raise<ConfigError>("host_ranks: wanted a divisor of the {} ranks, got {}", o.world, o.host_ranks);
}

Plan make_plan(const PlanOptions& options, const std::vector<GroupSpec>& groups) {
  validate(options);
  check_groups(groups);
  Plan plan{options, {}, {}};
  if (options.pending_reductions < 0)
    plan.options.pending_reductions = shares_memory(plan, RankGroup::reduce) ? 0 : 1;
  for (size_t g = 0; g < groups.size(); ++g) {
    const GroupSpec& spec = groups[g];
    const Format format = format_named(spec.format.empty() ? options.format : spec.format);
    const int64_t first = std::ssize(plan.tensors);
    plan.tensors.insert(plan.tensors.end(), spec.tensors.begin(), spec.tensors.end());
    plan.groups.push_back({.name = spec.name,
                           .backward_needs_parameters = spec.backward_needs_parameters,
                           .keep_after_forward = keeps_after_forward(options, groups, g),
                           .buckets = {plan_bucket(options, format, spec, first)}});
  }
  return plan;
}

std::vector<TensorPlace> tensor_places(const Plan& plan) {
  std::vector<TensorPlace> places(plan.tensors.size());
  for (int64_t g = 0; g < std::ssize(plan.groups); ++g)
    for (const BucketPlan& bucket : plan.groups[g].buckets)
      for (const SegmentLayout& s : bucket.segments)
        for (const Placement& p : s.placements) places.at(p.tensor) = {g, &s, &p};
  return places;
}

}  // namespace dovetail::plan
