// The packer for many tensors that must not be cut (whole matrices, experts): one cell at a time,
// by the best-filling pattern.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/plan/grid.h"
#include "dovetail/plan/packing.h"

namespace dovetail::plan {

struct CellRun {
  int type = 0;
  int64_t count = 0;  // equal things side by side
};

struct CellPacking {
  std::vector<CellRun> order;
  std::vector<int64_t> placed;  // how many of each type
  int64_t end = 0;              // first position behind everything placed
};

// Fills cells from position 0 with the types whose blocks divide neither the period nor the step or
// that are one block, and that fit into a cell. Every cell takes the largest thing left and
// whatever fills the rest best (minimum bin slack); a pattern is repeated while it lasts. Leaves
// everything else to the caller.
CellPacking pack_cells(const Grid& grid, const TensorTypes& types, int64_t capacity,
                       SearchEffort& effort);

}  // namespace dovetail::plan
