// Shard sizes that divisibility alone rules out (F3 of docs/planner.md). Not packing but this is
// what costs padding.
#pragma once

#include <cstdint>

#include "dovetail/plan/tensor_types.h"

namespace dovetail::plan {

// Smallest size >= `from` (>= 1) at which every tensor could be placed on its own, one level of
// shards: extent <= S, or block | S, or one cut serves (extent <= 2S and floor(S/block)*block + S
// >= extent). No smaller size >= `from` admits any plan.
int64_t next_admissible(const TensorTypes& types, int64_t from);

// The same for the step of a grid of this period: a necessary condition only; at most `period`.
int64_t next_admissible_step(const TensorTypes& types, int64_t period, int64_t from);

}  // namespace dovetail::plan
