// Which tensors share a segment: partitions of the classes of equal block, cheapest lower bound
// first.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/plan/ragged.h"
#include "dovetail/plan/segment_search.h"

namespace dovetail::plan {

struct SegmentPart {
  std::vector<int> tensors;  // ascending
  SegmentChoice choice;
};

struct SegmentsChoice {
  std::vector<SegmentPart> parts;
  int64_t bound3 = 0;  // proven bounds on the sums over segments
  int64_t bound1 = 0;
  bool exact = false;
  int64_t steps = 0;
};

// At most problem.max_segments parts of least summed cost; fewer parts where the cost is the same.
// Exact when the cost equals a bound for any assignment of blocks, when one segment is asked for
// and its search was exact, or when every class is a single tensor, so that the partitions
// enumerated are all there are.
SegmentsChoice choose_segments(const RaggedProblem& problem);

}  // namespace dovetail::plan
