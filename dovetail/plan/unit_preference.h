// Soft preference among layouts of equal shards: boundaries on the edges of update units cost no
// exchange.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/plan/ragged.h"

namespace dovetail::plan {

struct UnitEdges {
  int64_t alignment = 1;  // elements per planner unit
  std::vector<std::vector<int64_t>>
      edges;  // per tensor, elements, ascending from 0 to numel; empty = no preference
  bool any() const;
};

// Elements that lie outside the largest fragment of their update unit: what an exchange has to move
// to the owners.
int64_t exchanged_elements(const RaggedSegment& segment, const UnitEdges& units);

// Lowers exchanged_elements by trying other orders, and later starts within the padding that is
// there anyway. The shard sizes stay as they are. Deterministic; at most a fixed number of
// placements is tried.
void prefer_unit_edges(const RaggedProblem& problem, const UnitEdges& units,
                       RaggedSegment& segment);

}  // namespace dovetail::plan
