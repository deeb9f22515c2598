#include "dovetail/plan/segments.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "dovetail/base/math.h"
#include "dovetail/plan/lower_bound.h"

namespace dovetail::plan {
namespace {

constexpr size_t kMaxClasses = 9;    // more are merged: 3^9/6 partitions, 2^9 subsets
constexpr int kMaxEvaluations = 24;  // partitions searched
constexpr int64_t kStepsASegment = 10'000;
constexpr int64_t kStepsAllSegments = 30'000;  // without those of one segment of everything

using Mask = uint32_t;  // set of classes

// Tensors that stay together in one segment.
struct Class {
  std::vector<TensorType> types;  // without members
  std::vector<int> tensors;
  int64_t block = 1;  // common multiple of the blocks (a double's worth of it: only compared)
  int64_t volume = 0;

  bool same_as(const Class& o) const {
    return types.size() == 1 && o.types.size() == 1 && types[0].shape == o.types[0].shape &&
           types[0].count == o.types[0].count;
  }
};

int64_t common_multiple(int64_t a, int64_t b) {
  constexpr int64_t kMost = int64_t{1} << 61;
  const int64_t factor = a / std::gcd(a, b);
  return factor > kMost / b ? kMost : factor * b;
}

void join(Class& into, Class&& other) {
  into.types.insert(into.types.end(), other.types.begin(), other.types.end());
  into.tensors.insert(into.tensors.end(), other.tensors.begin(), other.tensors.end());
  into.block = common_multiple(into.block, other.block);
  into.volume += other.volume;
}

void join_equal(Class& into, Class&& other) {
  into.types[0].count += other.types[0].count;
  into.tensors.insert(into.tensors.end(), other.tensors.begin(), other.tensors.end());
  into.volume += other.volume;
}

// One class a tensor that has elements, coarsest block first, equal ones side by side.
std::vector<Class> single_classes(const RaggedProblem& problem) {
  std::vector<Class> classes;
  for (int i = 0; i < static_cast<int>(problem.tensors.size()); ++i) {
    const RaggedTensor& t = problem.tensors[i];
    if (t.extent > 0) classes.push_back({{{t, 1, {}}}, {i}, t.block, t.extent});
  }
  std::stable_sort(classes.begin(), classes.end(), [](const Class& a, const Class& b) {
    return a.block != b.block ? a.block > b.block : a.volume > b.volume;
  });
  return classes;
}

void join_fluid(std::vector<Class>& classes) {
  const auto fluid =
      std::find_if(classes.begin(), classes.end(), [](auto& c) { return c.block == 1; });
  for (auto c = fluid; c != classes.end(); ++c)
    if (c != fluid) join(*fluid, std::move(*c));
  if (fluid != classes.end()) classes.erase(fluid + 1, classes.end());
}

void join_equal_tensors(std::vector<Class>& classes) {
  std::vector<Class> joined;
  for (Class& c : classes) {
    const bool equal = !joined.empty() && c.types.size() == 1 && joined.back().types.size() == 1 &&
                       c.types[0].shape == joined.back().types[0].shape;
    if (equal)
      join_equal(joined.back(), std::move(c));
    else
      joined.push_back(std::move(c));
  }
  classes = std::move(joined);
}

// The pair that loses least by sharing a segment: smallest growth of the common block, then
// smallest volume.
void join_closest(std::vector<Class>& classes) {
  size_t a = 0, b = 1;
  std::pair<double, int64_t> least{-1, 0};
  for (size_t i = 0; i < classes.size(); ++i)
    for (size_t j = i + 1; j < classes.size(); ++j) {
      const double grown = common_multiple(classes[i].block, classes[j].block);
      const std::pair<double, int64_t> loss{grown / std::max(classes[i].block, classes[j].block),
                                            classes[i].volume + classes[j].volume};
      if (least.first >= 0 && loss >= least) continue;
      least = loss, a = i, b = j;
    }
  join(classes[a], std::move(classes[b]));
  classes.erase(classes.begin() + b);
}

std::vector<Class> classes_of(const RaggedProblem& problem) {
  std::vector<Class> classes = single_classes(problem);
  if (classes.size() > kMaxClasses) join_fluid(classes);
  if (classes.size() > kMaxClasses) join_equal_tensors(classes);
  while (classes.size() > kMaxClasses) join_closest(classes);
  return classes;
}

struct Partition {
  std::vector<Mask> parts;
  int64_t bound = 0;  // sum of the parts' cost bounds
};

class Partitions {
 public:
  Partitions(const RaggedProblem& problem, std::vector<Class> classes)
      : problem_(problem),
        classes_(std::move(classes)),
        bounds_(size_t{1} << classes_.size(), -1),
        choices_(bounds_.size()) {}

  // All partitions of the classes into at most max_segments parts, least bound first, then fewest
  // parts.
  std::vector<Partition> enumerate() {
    std::vector<Partition> all;
    std::vector<Mask> parts;
    extend(0, 0, parts, all);
    std::stable_sort(all.begin(), all.end(), [](const Partition& a, const Partition& b) {
      return a.bound != b.bound ? a.bound < b.bound : a.parts.size() < b.parts.size();
    });
    return all;
  }

  const SegmentChoice& choice(Mask mask, SearchEffort& effort) {
    if (!choices_[mask]) {
      // One segment of everything is searched as if no more were allowed: more are never worse.
      const bool all = mask + 1 == bounds_.size();
      SearchEffort own;
      if (!all) own.limit = std::min(kStepsASegment, effort.limit - effort.steps);
      choices_[mask] = SegmentSearch(problem_, tensors(mask)).run(own);
      effort.steps += own.steps;
      if (all) effort.limit += own.steps;  // its own account
    }
    return *choices_[mask];
  }

  std::vector<int> tensors(Mask mask) const {
    std::vector<int> r;
    for (size_t c = 0; c < classes_.size(); ++c)
      if (mask >> c & 1) r.insert(r.end(), classes_[c].tensors.begin(), classes_[c].tensors.end());
    std::sort(r.begin(), r.end());
    return r;
  }

 private:
  // Of equal neighbours the first lies in the part opened first: the others are the same partition.
  void extend(size_t c, size_t last, std::vector<Mask>& parts, std::vector<Partition>& all) {
    if (c == classes_.size()) {
      Partition p{parts, 0};
      for (Mask m : parts) p.bound += bound(m);
      all.push_back(std::move(p));
      return;
    }
    const size_t from = c > 0 && classes_[c].same_as(classes_[c - 1]) ? last : 0;
    for (size_t k = from; k <= parts.size(); ++k) {
      const bool fresh = k == parts.size();
      if (fresh && k == static_cast<size_t>(problem_.max_segments)) break;
      if (fresh) parts.push_back(0);
      parts[k] |= Mask{1} << c;
      extend(c + 1, k, parts, all);
      parts[k] &= ~(Mask{1} << c);
      if (fresh) parts.pop_back();
    }
  }

  int64_t bound(Mask mask) {
    if (bounds_[mask] < 0) {
      TensorTypes types;
      for (size_t c = 0; c < classes_.size(); ++c) {
        if (!(mask >> c & 1)) continue;
        types.types.insert(types.types.end(), classes_[c].types.begin(), classes_[c].types.end());
        types.total += classes_[c].volume;
      }
      bounds_[mask] = segment_bounds(problem_, types, counting_bound).cost;
    }
    return bounds_[mask];
  }

  const RaggedProblem& problem_;
  std::vector<Class> classes_;
  std::vector<int64_t> bounds_;  // of the cost, by mask; -1 = not computed yet
  std::vector<std::optional<SegmentChoice>> choices_;
};

struct Evaluated {
  const Partition* best = nullptr;
  int64_t cost = 0;
  int64_t proven = 0;  // no partition of the classes costs less
};

Evaluated evaluate(Partitions& partitions, const std::vector<Partition>& all,
                   SearchEffort& effort) {
  Evaluated r;
  bool any_bound = false;
  const auto lower_to = [&](int64_t bound) {
    r.proven = any_bound ? std::min(r.proven, bound) : bound;
    any_bound = true;
  };
  const auto take = [&](const Partition& p) {
    int64_t cost = 0, bound = 0;
    for (Mask m : p.parts) {
      const SegmentChoice& c = partitions.choice(m, effort);
      cost += c.cost;
      bound += c.bounds.cost;
    }
    lower_to(bound);
    if (!r.best || cost < r.cost || (cost == r.cost && p.parts.size() < r.best->parts.size()))
      r.best = &p, r.cost = cost;
  };
  const auto can_win = [&](const Partition& p) {
    return !r.best || p.bound < r.cost ||
           (p.bound == r.cost && p.parts.size() < r.best->parts.size());
  };
  int evaluations = 0;
  for (const Partition& p : all) {
    if (!can_win(p)) {
      lower_to(p.bound);
      if (p.bound > r.cost) break;  // and so are all after it
    } else if (evaluations++ == kMaxEvaluations || (r.best && effort.spent())) {
      lower_to(p.bound);
      break;
    } else {
      take(p);
    }
  }
  const auto whole =
      std::find_if(all.begin(), all.end(), [](const Partition& p) { return p.parts.size() == 1; });
  if (can_win(*whole)) take(*whole);
  return r;
}

SegmentsChoice one_segment(const RaggedProblem& problem, std::vector<int> everything,
                           SearchEffort& effort) {
  SegmentChoice c = SegmentSearch(problem, everything).run(effort);
  SegmentsChoice r;
  r.bound3 = c.bounds.shard2 * (problem.degrees.zero2 / problem.degrees.zero3);
  r.bound1 = c.bounds.shard1;
  r.exact = c.exact;
  r.parts.push_back({std::move(everything), std::move(c)});
  return r;
}

// For any number of segments: the relations of the levels hold for the sums too.
void bound_any_segments(const RaggedProblem& problem, const TensorTypes& types, SegmentsChoice& r) {
  const Degrees& d = problem.degrees;
  const int64_t bound2 = std::max(block_bound(types, d.zero2),
                                  ceil_div(block_bound(types, d.zero3), d.zero2 / d.zero3));
  r.bound3 = bound2 * (d.zero2 / d.zero3);
  r.bound1 = std::max(block_bound(types, d.zero1), ceil_div(bound2, d.zero1 / d.zero2));
}

}  // namespace

SegmentsChoice choose_segments(const RaggedProblem& problem) {
  SearchEffort effort;
  std::vector<int> everything(problem.tensors.size());
  std::iota(everything.begin(), everything.end(), 0);
  std::vector<Class> classes = classes_of(problem);
  SegmentsChoice r;
  if (problem.max_segments == 1 || classes.size() < 2) {
    r = one_segment(problem, std::move(everything), effort);
  } else {
    bound_any_segments(problem, group_by_type(problem.tensors, everything), r);
    const bool all_partitions = std::all_of(classes.begin(), classes.end(),
                                            [](const Class& c) { return c.tensors.size() == 1; });
    Partitions partitions(problem, std::move(classes));
    const std::vector<Partition> all = partitions.enumerate();
    effort.limit = kStepsAllSegments;
    const Evaluated e = evaluate(partitions, all, effort);
    const int64_t any = problem.weights.zero3 * r.bound3 + problem.weights.zero1 * r.bound1;
    r.exact = e.cost == any || (all_partitions && e.cost == e.proven);
    for (Mask m : e.best->parts)
      r.parts.push_back({partitions.tensors(m), partitions.choice(m, effort)});
    for (int i : everything)
      if (problem.tensors[i].extent == 0) r.parts.front().tensors.push_back(i);
  }
  r.steps = effort.steps;
  return r;
}

}  // namespace dovetail::plan
