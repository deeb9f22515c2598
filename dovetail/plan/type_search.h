// The exact search over type counts (F2 of docs/planner.md): with every tensor at its earliest
// start, only the smallest end of each multiset of placed types matters.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/base/interval.h"
#include "dovetail/plan/grid.h"
#include "dovetail/plan/packing.h"

namespace dovetail::plan {

// A move of the search: `run` consecutive equal tensors of one type, available `count` times.
struct Move {
  RaggedTensor shape;
  int type = 0;
  int64_t run = 1;
  int64_t count = 1;
};

struct TypeOrder {
  Verdict verdict = Verdict::unknown;
  std::vector<int> moves;  // indices of moves in placing order, when it fits
};

// Searches layer by layer in the number of moves made, within the positions of `range`, keeping at
// most `beam` states a layer (smallest gap, then most hard blocks placed). `refused` only when
// nothing was ever dropped.
TypeOrder search_types(const Grid& grid, const std::vector<Move>& moves, Interval range, int beam,
                       SearchEffort& effort);

}  // namespace dovetail::plan
