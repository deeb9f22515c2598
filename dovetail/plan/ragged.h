// The ragged-sharding planner: lays tensors into one to three segments so that shard boundaries cut
// only between blocks, with the smallest shards. docs/planner.md has the formulation, the facts
// F1-F6 and the instances. Everything is in units (see grid.h) and a pure function of its input:
// bounded by counts, never by time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dovetail/plan/degrees.h"
#include "dovetail/plan/grid.h"

namespace dovetail::plan {

// What is minimised: zero3 * S3 + zero1 * S1, summed over the segments. Defaults count collectives
// a step: two unshards and a reduction at the coarse level, a reduction and a gather at the fine
// one.
struct CollectiveWeights {
  int64_t zero3 = 3;
  int64_t zero1 = 2;
};

struct RaggedProblem {
  std::vector<RaggedTensor> tensors;  // an extent of 0 is allowed: placed at 0, owns nothing
  Degrees degrees;
  int max_segments = 1;  // 1..3
  CollectiveWeights weights;
};

struct RaggedPlacement {
  int tensor = 0;
  int64_t offset = 0;  // in the segment's space [0, zero3 * shard3)
  bool operator==(const RaggedPlacement&) const = default;
};

// Boundaries: k * shard2 + j * shard1 with j * shard1 < shard2. shard3 = shard2 * zero2/zero3;
// zero1/zero2 * shard1 >= shard2, and the last sub-shards of a zero2 shard may be short or empty.
struct RaggedSegment {
  int64_t shard3 = 0;
  int64_t shard2 = 0;
  int64_t shard1 = 0;
  int64_t bound3 = 0;  // proven: these tensors cannot share a segment of a smaller shard3
  std::vector<RaggedPlacement> placements;  // by offset
  bool operator==(const RaggedSegment&) const = default;
};

struct RaggedPlan {
  std::vector<RaggedSegment> segments;
  // Proven lower bounds on the sums over segments; what was reached, when exact.
  int64_t bound3 = 0;
  int64_t bound1 = 0;
  bool exact = false;  // proved: no plan of at most max_segments segments has a smaller objective
  int64_t steps = 0;   // search steps

  int64_t shard3() const;  // sums over the segments
  int64_t shard1() const;
};

// The plan has passed verify(). Throws ConfigError for bad input (which tensor, wanted, got).
RaggedPlan plan_ragged(const RaggedProblem& problem);

// Checks a plan from the definition, sharing nothing with the search: every tensor placed once,
// inside the space and disjoint, sizes of the levels related as above, and every boundary of every
// level a multiple of the block after the start of the tensor it cuts. Throws PlanError naming the
// tensor and the boundary.
void verify(const RaggedProblem& problem, std::span<const RaggedSegment> segments);

}  // namespace dovetail::plan
