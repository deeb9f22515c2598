#include "dovetail/plan/segment_search.h"

#include <algorithm>
#include <numeric>
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

SegmentBounds segment_bounds(const RaggedProblem& problem, const TensorTypes& types,
                             int64_t (*block_bound)(const TensorTypes&, int64_t)) {
  SegmentBounds r;
  if (types.types.empty()) return r;
  const Degrees& n = problem.degrees;
  const int64_t coarse = n.zero2 / n.zero3, fine = n.zero1 / n.zero2;
  r.shard2 = next_admissible(types, block_bound(types, n.zero3));
  if (coarse > 1) {
    const int64_t least = std::max(block_bound(types, n.zero2), ceil_div(r.shard2, coarse));
    r.shard2 = next_admissible(types, least);
  }
  r.shard1 = r.shard2;
  if (fine > 1) r.shard1 = std::max(block_bound(types, n.zero1), ceil_div(r.shard2, fine));
  r.cost = problem.weights.zero3 * coarse * r.shard2 + problem.weights.zero1 * r.shard1;
  return r;
}

SegmentSearch::SegmentSearch(const RaggedProblem& problem, std::span<const int> chosen)
    : problem_(problem),
      types_(group_by_type(problem.tensors, chosen)),
      bounds_(segment_bounds(problem, types_, block_bound)),
      coarse_ratio_(problem.degrees.zero2 / problem.degrees.zero3),
      fine_ratio_(problem.degrees.zero1 / problem.degrees.zero2) {}

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

// The best of the sizes that are whole blocks of many tensors at once: those that leave no gap
// (F6 of docs/planner.md), if seldom the smallest. Shard 0 when none fits.
SegmentSearch::Level SegmentSearch::aligned_level(const Packer& packer, int64_t bound,
                                                  SearchEffort& effort) const {
  Level best;
  int64_t common = 1;
  // Growing multiples of the blocks that can be cut, longest tensors first.
  std::vector<RaggedTensor> cut;
  for (const TensorType& t : types_.types)
    if (t.shape.block < t.shape.extent) cut.push_back(t.shape);
  std::sort(cut.begin(), cut.end(), [](RaggedTensor a, RaggedTensor b) {
    return a.extent != b.extent ? a.extent > b.extent : a.block > b.block;
  });
  for (const RaggedTensor& t : cut) {
    const int64_t factor = t.block / std::gcd(common, t.block);
    if (factor == 1) continue;
    if (common > types_.total / factor) break;
    common *= factor;
    const int64_t s = next_admissible(types_, round_up(bound, common));
    if (best.shard > 0 && s >= best.shard) break;
    Packing p = packer.pack_fixed({s, s}, effort);
    if (p.verdict == Verdict::fits) best = {s, bound, s == bound, std::move(p.order)};
  }
  return best;
}

// Walk up the admissible sizes below the best aligned one; where the walk ends before it and there
// is none, double the stride until one fits; then bisect.
SegmentSearch::Level SegmentSearch::one_level(int64_t shards, int64_t bound,
                                              SearchEffort& effort) const {
  const Packer packer(problem_.tensors, types_, shards);
  Level found = aligned_level(packer, bound, effort);
  bool proved = true;
  int64_t s = bound, below = bound - 1;
  for (int n = 0; n < kWalk && !(n > 0 && effort.spent()); ++n) {
    if (found.shard > 0 && s >= found.shard) {
      found.bound = bound;
      found.exact = proved || found.shard == bound;
      return found;
    }
    Packing p = packer.pack({s, s}, effort);
    if (p.verdict == Verdict::fits) return {s, bound, proved, std::move(p.order)};
    proved &= p.verdict == Verdict::refused;
    below = s;
    s = next_admissible(types_, s + 1);
    if (proved) bound = s;
  }
  for (int64_t stride = s - bound + 1; found.shard == 0; stride *= 2) {
    Packing p = packer.pack({s, s}, effort);
    if (p.verdict == Verdict::fits)
      found = {s, bound, false, std::move(p.order)};
    else
      below = std::exchange(s, next_admissible(types_, s + stride));
  }
  for (int64_t high = found.shard; high - below > 1;) {
    const int64_t middle = below + (high - below) / 2;
    s = next_admissible(types_, middle);
    if (s >= found.shard) {
      high = middle;
      continue;
    }
    Packing p = packer.pack({s, s}, effort);
    if (p.verdict == Verdict::fits)
      found = {high = s, bound, false, std::move(p.order)};
    else
      below = s;
  }
  found.bound = bound;
  found.exact = found.shard == bound;
  return found;
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
