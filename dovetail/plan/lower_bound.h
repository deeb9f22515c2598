// Lower bounds on the shard that hold for every assignment of whole blocks to ranks (F4 of
// docs/planner.md).
#pragma once

#include <cstdint>

#include "dovetail/plan/tensor_types.h"

namespace dovetail::plan {

// Smallest shard, in units, that `shards` ranks need to hold all blocks, contiguous or not, in any
// number of segments: volume, largest block, counts of large blocks.
int64_t counting_bound(const TensorTypes& types, int64_t shards);

// The same with the bin-packing bounds by dual feasible functions (Fekete and Schepers, "New
// classes of fast lower bounds for bin packing problems", 2001: u_k for k = 1..40, and thresholds);
// a hundred times the work where they apply.
int64_t block_bound(const TensorTypes& types, int64_t shards);

}  // namespace dovetail::plan
