// What a plan costs, predicted: bytes held by each rank, by role, and payload bytes sent in a step, by phase. The engine
// measures both and tests compare them for equality.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dovetail/plan/plan.h"

namespace dovetail::plan {

// Bytes allocated for the whole run. Roles whose memory is shared with another (main weights that are views of the
// runtime shard) are 0.
struct HeldBytes {
  int64_t main = 0;           // zero1 shard of main weights; 0 when views of the runtime shard
  int64_t runtime = 0;        // zero3 shard, all planes
  int64_t gradient = 0;       // fp32, zero2 shard
  int64_t main_gradient = 0;  // fp32, zero1 shard; 0 when the same as the zero2 shard
  int64_t accumulator = 0;    // whole fp32 gradients (local accumulation)
  int64_t state = 0;          // optimizer fields
  int64_t slots = 0;          // pool: gather and gradient buffers, reduction scratch
  int64_t total() const;
  bool operator==(const HeldBytes&) const = default;
};

// Payload sent by one rank in one optimizer step.
struct SentBytes {
  int64_t refresh = 0;
  int64_t gather_forward = 0;
  int64_t gather_backward = 0;
  int64_t reduce = 0;
  int64_t reduce_main = 0;
  int64_t total() const;
  bool operator==(const SentBytes&) const = default;
};

// What happens in a step that the plan does not fix.
struct StepShape {
  int64_t micro_batches = 1;
  bool synchronise_each = true;          // false: local accumulation, gradients reduced after the last micro-batch only
  std::vector<bool> trainable;           // per group; empty = all
};

// `state_bytes[t]`: bytes of optimizer state per element of tensor t.
HeldBytes held_bytes(const Plan& plan, int64_t rank, const std::vector<int64_t>& state_bytes);
SentBytes sent_bytes(const Plan& plan, int64_t rank, const StepShape& shape);

}  // namespace dovetail::plan
