// Who a collective is: ranks compare identities before any byte is used.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dovetail::comm {

// What the bytes are for; counters are kept per phase.
enum class Phase : uint8_t {
  control,          // votes, hashes, barriers
  refresh,          // runtime shard from main weights, over zero1/zero3 ranks
  gather_forward,   // whole runtime parameters for the forward pass
  gather_backward,  // and for the backward pass
  reduce,           // gradients, over zero2 ranks
  reduce_main,      // gradients of the zero1 shard, over zero1/zero2 ranks and replicas
  norm,             // gradient norms
  fragment,         // fragments of update units
  state,            // checkpoints, broadcasts of initial weights
};
inline constexpr int kPhases = 9;
std::string_view name_of(Phase phase);

struct Identity {
  Phase phase = Phase::control;
  int32_t unit = -1;        // index of the plan's group; -1 for what concerns no single unit
  int64_t step = 0;         // optimizer steps done so far
  std::string_view label;   // unit or operation in words, the same on all members; its first 31 bytes travel
  // "gather_forward of layers.3, step 7"
  std::string describe() const;
};

}  // namespace dovetail::comm
