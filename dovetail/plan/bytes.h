// What a plan costs, predicted: bytes held by each rank, by role, and payload bytes sent in a step, by phase.
// The engine measures both and tests compare them for equality.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dovetail/plan/plan.h"

namespace dovetail::plan {

// Bytes allocated for the whole run. Roles whose memory is shared with another are 0. Sums over all segments
// of all buckets; n1 is the size of the rank's zero1 interval (its last one may be short), padding included.
struct HeldBytes {
  int64_t main = 0;           // n1 * main dtype; 0 when views of the runtime shard (Format::is_plain)
  int64_t runtime = 0;        // shard3 elements, all planes; 0 where encodes_at_gather()
  int64_t gradient = 0;       // 4 * shard2
  int64_t main_gradient = 0;  // 4 * n1; 0 when the same as the zero2 shard (zero1 == zero2)
  int64_t accumulator = 0;    // 4 * zero3 * shard3 with local accumulation, unless zero2 == 1
  int64_t state = 0;          // what its tensors keep for the rank's zero1 parts, see StateShape; no padding
  int64_t slots = 0;          // pool_slots: gather and gradient buffers, reduction scratch
  int64_t unit_state = 0;     // state of the assembled units that the rank owns
  int64_t staging = 0;        // plan/staging.h: units on their way, and packed
  int64_t workspace = 0;      // scratch of the update operation that wants most
  int64_t total() const;
  bool operator==(const HeldBytes&) const = default;
};

// Payload sent by one rank in one optimizer step. Sums over segments; n1 as above.
struct SentBytes {
  int64_t refresh = 0;          // own n1, all planes, to each of the zero1/zero3 - 1 others
  int64_t gather_forward = 0;   // per micro-batch and gathered group: own shard3, planes read, to zero3 - 1 others;
                                // nothing where they share memory
  int64_t gather_backward = 0;  // the same, where backward gathers again
  int64_t reduce = 0;           // per reduced micro-batch and trainable group: shard2 to each of zero2 - 1 others,
                                // in the format's gradient dtype (fp32 with local accumulation)
  int64_t fragment = 0;         // plan::fragment_bytes, all fields
  int64_t reduce_main = 0;      // per trainable group, fp32: what of shard2 is not own n1, to its owners; then an
                                // all-reduce of n1 over r = world/zero1 replicas: all slices but the own one
                                // (all_reduce_slice), and the own one to r - 1 others
  int64_t total() const;
  bool operator==(const SentBytes&) const = default;
};

// What happens in a step that the plan does not fix.
struct StepShape {
  int64_t micro_batches = 1;
  bool synchronise_each = true;          // false: gradients reduced after the last micro-batch only; needs local
                                         // accumulation (or zero2 == 1: nothing is sent either way)
  std::vector<bool> trainable;           // per group; empty = all
};

// One field of optimizer state: one value of so many bytes for each run of `per` elements, counted from the tensor's
// start.
struct StateShape {
  int64_t bytes = 4;
  int64_t per = 1;
};

// `state[t]`: the fields of tensor t. What assembled units add (unit_state, staging, workspace, fragment) is
// left 0: see plan/staging.h. Throws ConfigError for lists of the wrong length, ranks outside the world, and
// shapes that the plan cannot run.
HeldBytes held_bytes(const Plan& plan, int64_t rank, const std::vector<std::vector<StateShape>>& state);
SentBytes sent_bytes(const Plan& plan, int64_t rank, const StepShape& shape);

}  // namespace dovetail::plan
