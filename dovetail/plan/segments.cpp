#include "dovetail/plan/segments.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>

#include "dovetail/base/math.h"
#include "dovetail/plan/lower_bound.h"

namespace dovetail::plan {
namespace {

constexpr size_t kMaxClasses = 9;    // more are merged: 3^9/6 partitions, 2^9 subsets
constexpr int kMaxEvaluations = 24;  // partitions searched

using Mask = uint32_t;  // set of classes

struct BlockClass {
  int64_t block;
  std::vector<int> tensors;
};

// Classes of equal block, coarsest first; empty tensors go with the first class.
std::vector<BlockClass> classes_of(const RaggedProblem& problem) {
  std::map<int64_t, std::vector<int>, std::greater<>> by_block;
  for (int i = 0; i < static_cast<int>(problem.tensors.size()); ++i)
    by_block[problem.tensors[i].block].push_back(i);
  std::vector<BlockClass> classes;
  for (auto& [block, tensors] : by_block) classes.push_back({block, std::move(tensors)});
  return classes;
}

// Joins the two classes whose blocks have the smallest common multiple until few enough are left.
void merge_classes(std::vector<BlockClass>& classes) {
  while (classes.size() > kMaxClasses) {
    size_t a = 0, b = 1;
    double least = -1;
    for (size_t i = 0; i < classes.size(); ++i)
      for (size_t j = i + 1; j < classes.size(); ++j) {
        const double common = double(classes[i].block) /
                              std::gcd(classes[i].block, classes[j].block) * classes[j].block;
        if (least >= 0 && common >= least) continue;
        least = common, a = i, b = j;
      }
    classes[a].block =
        classes[a].block / std::gcd(classes[a].block, classes[b].block) * classes[b].block;
    classes[a].tensors.insert(classes[a].tensors.end(), classes[b].tensors.begin(),
                              classes[b].tensors.end());
    classes.erase(classes.begin() + b);
  }
}

struct Partition {
  std::vector<Mask> parts;
  int64_t bound = 0;  // sum of the parts' cost bounds
};

class Partitions {
 public:
  Partitions(const RaggedProblem& problem, std::vector<BlockClass> classes)
      : problem_(problem),
        classes_(std::move(classes)),
        searches_(size_t{1} << classes_.size()),
        choices_(searches_.size()) {}

  // All partitions of the classes into at most max_segments parts, least bound first, then fewest
  // parts.
  std::vector<Partition> enumerate() {
    std::vector<Partition> all;
    std::vector<Mask> parts;
    extend(0, parts, all);
    std::stable_sort(all.begin(), all.end(), [](const Partition& a, const Partition& b) {
      return a.bound != b.bound ? a.bound < b.bound : a.parts.size() < b.parts.size();
    });
    return all;
  }

  const SegmentChoice& choice(Mask mask, SearchEffort& effort) {
    if (!choices_[mask]) choices_[mask] = search(mask).run(effort);
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
  void extend(size_t c, std::vector<Mask>& parts, std::vector<Partition>& all) {
    if (c == classes_.size()) {
      Partition p{parts, 0};
      for (Mask m : parts) p.bound += search(m).bounds().cost;
      all.push_back(std::move(p));
      return;
    }
    for (size_t k = 0; k <= parts.size(); ++k) {
      const bool fresh = k == parts.size();
      if (fresh && k == static_cast<size_t>(problem_.max_segments)) break;
      if (fresh) parts.push_back(0);
      parts[k] |= Mask{1} << c;
      extend(c + 1, parts, all);
      parts[k] &= ~(Mask{1} << c);
      if (fresh) parts.pop_back();
    }
  }

  const SegmentSearch& search(Mask mask) {
    if (!searches_[mask])
      searches_[mask] = std::make_unique<SegmentSearch>(problem_, tensors(mask));
    return *searches_[mask];
  }

  const RaggedProblem& problem_;
  std::vector<BlockClass> classes_;
  std::vector<std::unique_ptr<SegmentSearch>> searches_;
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
  int evaluations = 0;
  for (const Partition& p : all) {
    const bool can_win =
        !r.best || p.bound < r.cost || (p.bound == r.cost && p.parts.size() < r.best->parts.size());
    if (!can_win && p.bound >= r.cost) {
      lower_to(p.bound);
      continue;
    }
    if (evaluations++ == kMaxEvaluations) {
      lower_to(p.bound);
      break;
    }
    int64_t cost = 0, bound = 0;
    for (Mask m : p.parts) {
      const SegmentChoice& c = partitions.choice(m, effort);
      cost += c.cost;
      bound += c.bounds.cost;
    }
    lower_to(bound);
    if (!r.best || cost < r.cost || (cost == r.cost && p.parts.size() < r.best->parts.size()))
      r.best = &p, r.cost = cost;
  }
  return r;
}

}  // namespace

SegmentsChoice choose_segments(const RaggedProblem& problem) {
  SearchEffort effort;
  SegmentsChoice r;
  std::vector<int> everything(problem.tensors.size());
  std::iota(everything.begin(), everything.end(), 0);
  if (problem.max_segments == 1) {
    SegmentChoice c = SegmentSearch(problem, everything).run(effort);
    r.bound3 = c.bounds.shard2 * (problem.degrees.zero2 / problem.degrees.zero3);
    r.bound1 = c.bounds.shard1;
    r.exact = c.exact;
    r.parts.push_back({std::move(everything), std::move(c)});
    r.steps = effort.steps;
    return r;
  }
  const TensorTypes types = group_by_type(problem.tensors, everything);
  // The relations of the levels hold for the sums over segments too.
  const Degrees& d = problem.degrees;
  const int64_t bound2 = std::max(block_bound(types, d.zero2),
                                  ceil_div(block_bound(types, d.zero3), d.zero2 / d.zero3));
  r.bound3 = bound2 * (d.zero2 / d.zero3);
  r.bound1 = std::max(block_bound(types, d.zero1), ceil_div(bound2, d.zero1 / d.zero2));
  std::vector<BlockClass> classes = classes_of(problem);
  const bool all_partitions =
      classes.size() == problem.tensors.size() && classes.size() <= kMaxClasses;
  merge_classes(classes);
  Partitions partitions(problem, std::move(classes));
  const std::vector<Partition> all = partitions.enumerate();
  const Evaluated e = evaluate(partitions, all, effort);
  const int64_t any = problem.weights.zero3 * r.bound3 + problem.weights.zero1 * r.bound1;
  r.exact = e.cost == any || (all_partitions && e.cost == e.proven);
  for (Mask m : e.best->parts)
    r.parts.push_back({partitions.tensors(m), partitions.choice(m, effort)});
  r.steps = effort.steps;
  return r;
}

}  // namespace dovetail::plan
