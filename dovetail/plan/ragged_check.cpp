#include <algorithm>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/plan/ragged.h"

namespace dovetail::plan {
namespace {

void verify_shards(const Degrees& n, const RaggedSegment& s, size_t number) {
  const bool nested = s.shard3 * n.zero3 == s.shard2 * n.zero2 &&
                      s.shard1 * (n.zero1 / n.zero2) >= s.shard2 && s.shard1 <= s.shard2;
  if (!nested || (n.zero1 == n.zero2 && s.shard1 != s.shard2) || s.shard1 < 0)
    raise<PlanError>(
        "segment {}: shards of {}, {} and {} units do not nest for zero3 {}, zero2 {}, zero1 {}",
        number, s.shard3, s.shard2, s.shard1, n.zero3, n.zero2, n.zero1);
}

void verify_cut(int tensor, const RaggedTensor& t, int64_t offset, int64_t boundary) {
  if (offset < boundary && boundary < offset + t.extent && (boundary - offset) % t.block != 0)
    raise<PlanError>("tensor {} at {}: the boundary at {} cuts a block of {} units", tensor, offset,
                     boundary, t.block);
}

// Every boundary of the segment that may lie inside [offset, offset + extent).
void verify_cuts(const RaggedSegment& s, int tensor, const RaggedTensor& t, int64_t offset) {
  for (int64_t base = offset / s.shard2 * s.shard2; base < offset + t.extent; base += s.shard2) {
    const int64_t skipped = std::max<int64_t>(0, (offset - base) / s.shard1);
    for (int64_t inner = skipped * s.shard1; inner < s.shard2 && base + inner < offset + t.extent;
         inner += s.shard1)
      verify_cut(tensor, t, offset, base + inner);
  }
}

}  // namespace

void verify(const RaggedProblem& problem, std::span<const RaggedSegment> segments) {
  std::vector<int> placed(problem.tensors.size(), 0);
  for (size_t number = 0; number < segments.size(); ++number) {
    const RaggedSegment& s = segments[number];
    verify_shards(problem.degrees, s, number);
    int64_t end = 0;
    for (const RaggedPlacement& p : s.placements) {
      if (p.tensor < 0 || p.tensor >= static_cast<int>(placed.size()) || placed[p.tensor]++ > 0)
        raise<PlanError>("segment {}: tensor {} is unknown or placed twice", number, p.tensor);
      const RaggedTensor& t = problem.tensors[p.tensor];
      if (p.offset < end || p.offset + t.extent > problem.degrees.zero3 * s.shard3)
        raise<PlanError>(
            "tensor {}: [{}, {}) overlaps its neighbour, which ends at {}, or the space of {} "
            "units",
            p.tensor, p.offset, p.offset + t.extent, end, problem.degrees.zero3 * s.shard3);
      if (t.extent > 0) verify_cuts(s, p.tensor, t, p.offset);
      end = p.offset + t.extent;
    }
  }
  for (size_t i = 0; i < placed.size(); ++i)
    if (placed[i] == 0) raise<PlanError>("tensor {} is not placed", i);
}

}  // namespace dovetail::plan
