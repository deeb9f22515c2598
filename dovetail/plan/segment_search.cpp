#include "dovetail/plan/segment_search.h"

#include <algorithm>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/plan/admissible.h"
#include "dovetail/plan/lower_bound.h"

namespace dovetail::plan {
namespace {

constexpr int kWalk = 24;     // admissible sizes tried one by one
constexpr int kPeriods = 48;  // coarse shards tried with two radices
constexpr int kSteps = 12;    // fine shards tried for each

}  // namespace

SegmentSearch::SegmentSearch(const RaggedProblem& problem, std::span<const int> chosen)
    : problem_(problem),
      types_(group_by_type(problem.tensors, chosen)),
      coarse_ratio_(problem.degrees.zero2 / problem.degrees.zero3),
      fine_ratio_(problem.degrees.zero1 / problem.degrees.zero2) {
  if (types_.types.empty()) return;
  const Degrees& n = problem.degrees;
  const int64_t coarse = next_admissible(types_, block_bound(types_, n.zero3));
  bounds_.shard2 = coarse_ratio_ == 1
                       ? coarse
                       : next_admissible(types_, std::max(block_bound(types_, n.zero2),
                                                          ceil_div(coarse, coarse_ratio_)));
  bounds_.shard1 = fine_ratio_ == 1 ? bounds_.shard2
                                    : std::max(block_bound(types_, n.zero1),
                                               ceil_div(bounds_.shard2, fine_ratio_));
  bounds_.cost = cost(bounds_.shard2, bounds_.shard1);
}

int64_t SegmentSearch::cost(int64_t period, int64_t step) const {
  return problem_.weights.zero3 * coarse_ratio_ * period + problem_.weights.zero1 * step;
}

int64_t SegmentSearch::least_step(int64_t period) const {
  return std::max(bounds_.shard1, ceil_div(period, fine_ratio_));
}

void SegmentSearch::accept(SegmentChoice& best, Grid grid, std::vector<int> order) const {
  const int64_t c = cost(grid.period, grid.step);
  if (!best.order.empty() && c >= best.cost) return;
  best.grid = grid;
  best.order = std::move(order);
  best.cost = c;
}

// Walk up the admissible sizes; past the walk double the stride until one fits and bisect back.
SegmentSearch::Level SegmentSearch::one_level(int64_t shards, int64_t bound,
                                              SearchEffort& effort) const {
  const Packer packer(problem_.tensors, types_, shards);
  bool proved = true;
  int64_t s = bound, below = bound - 1;
  for (int n = 0; n < kWalk; ++n) {
    Packing p = packer.pack({s, s}, effort);
    if (p.verdict == Verdict::fits) return {s, bound, proved, std::move(p.order)};
    proved &= p.verdict == Verdict::refused;
    below = s;
    s = next_admissible(types_, s + 1);
    if (proved) bound = s;
  }
  Packing found;
  for (int64_t stride = s - bound + 1;; stride *= 2) {
    found = packer.pack({s, s}, effort);
    if (found.verdict == Verdict::fits) break;
    below = s;
    s = next_admissible(types_, s + stride);
  }
  while (next_admissible(types_, below + 1) < s) {
    const int64_t middle = next_admissible(types_, below + (s - below) / 2);
    if (middle >= s) {
      below = below + (s - below) / 2;
      continue;
    }
    Packing p = packer.pack({middle, middle}, effort);
    if (p.verdict == Verdict::fits) {
      s = middle;
      found = std::move(p);
    } else {
      below = middle;
    }
  }
  return {s, bound, s == bound, std::move(found.order)};
}

// Fine shards for one coarse one, smallest first. Returns whether everything below the best cost
// was decided.
bool SegmentSearch::scan_steps(SegmentChoice& best, int64_t period, SearchEffort& effort) const {
  const Packer packer(problem_.tensors, types_, problem_.degrees.zero2);
  bool decided = true;
  int64_t step = next_admissible_step(types_, period, least_step(period));
  for (int n = 0; best.order.empty() || cost(period, step) < best.cost; ++n) {
    if (n == kSteps) return false;
    Packing p = packer.pack({period, step}, effort);
    if (p.verdict == Verdict::fits) {
      accept(best, {period, step}, std::move(p.order));
      break;
    }
    decided &= p.verdict == Verdict::refused;
    if (step == period) break;
    step = next_admissible_step(types_, period, step + 1);
  }
  return decided;
}

// When no two radices were found: one radix, or the coarse level alone with steps doubled until
// they fit.
void SegmentSearch::fall_back(SegmentChoice& best, const Level& coarse,
                              SearchEffort& effort) const {
  Level fine = one_level(problem_.degrees.zero1, next_admissible(types_, bounds_.shard1), effort);
  accept(best, {fine.shard * fine_ratio_, fine.shard}, std::move(fine.order));
  accept(best, {coarse.shard, coarse.shard}, coarse.order);
  const Packer packer(problem_.tensors, types_, problem_.degrees.zero2);
  for (int64_t step = least_step(coarse.shard);; step *= 2) {
    step = next_admissible_step(types_, coarse.shard, step);
    if (cost(coarse.shard, step) >= best.cost) return;
    if (Packing p = packer.pack({coarse.shard, step}, effort); p.verdict == Verdict::fits)
      return accept(best, {coarse.shard, step}, std::move(p.order));
  }
}

void SegmentSearch::scan_periods(SegmentChoice& best, const Level& coarse,
                                 SearchEffort& effort) const {
  const Packer packer(problem_.tensors, types_, problem_.degrees.zero2);
  bool decided = coarse.exact, finished = false;
  int64_t period = coarse.shard;
  for (int n = 0; n < kPeriods && !finished && !effort.spent(); ++n) {
    const Verdict alone = n == 0 ? Verdict::fits : packer.pack({period, period}, effort).verdict;
    if (alone == Verdict::fits) decided &= scan_steps(best, period, effort);
    decided &= alone != Verdict::unknown;
    period = next_admissible(types_, period + 1);
    finished = !best.order.empty() && cost(period, least_step(period)) >= best.cost;
  }
  if (!finished) fall_back(best, coarse, effort);
  best.exact = (decided && finished) || best.cost == best.bounds.cost;
}

SegmentChoice SegmentSearch::run(SearchEffort& effort) const {
  SegmentChoice best;
  best.bounds = bounds_;
  if (types_.types.empty()) return best.exact = true, best;
  Level coarse = one_level(problem_.degrees.zero2, bounds_.shard2, effort);
  best.bounds.shard2 = coarse.bound;
  best.bounds.shard1 = fine_ratio_ == 1
                           ? coarse.bound
                           : std::max(bounds_.shard1, ceil_div(coarse.bound, fine_ratio_));
  best.bounds.cost = cost(best.bounds.shard2, best.bounds.shard1);
  if (fine_ratio_ == 1) {
    accept(best, {coarse.shard, coarse.shard}, std::move(coarse.order));
    best.exact = coarse.exact;
  } else {
    scan_periods(best, coarse, effort);
  }
  if (best.exact) best.bounds = {best.grid.period, best.grid.step, best.cost};
  return best;
}

}  // namespace dovetail::plan
