// The order of one optimizer step: which group is gathered, computed, released and reduced when. The engine follows these
// rules as hooks fire; the planner replays them to size the slot pool and the simulator to price a step.
//
// Forward, at the start of group g: gather g unless under way, gather the next `prefetch` groups, wait for g. At its end:
// release g unless it stays. Backward, at the start of g: the same with the groups before it, then open g's gradient
// buffer. At its end: release g, finish reductions until fewer than max(1, pending_reductions) are in flight, start
// reducing g (and finish it at once when pending_reductions is 0). The root group is gathered before all others, released
// and reduced after all others. At the end of backward all reductions are finished.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dovetail/plan/plan.h"

namespace dovetail::plan {

enum class Action : uint8_t {
  refresh,        // runtime shard from main weights, over zero1/zero3 ranks (all groups, once a step)
  gather,         // issue the gather of a group's runtime parameters
  compute,        // wait for the gather; forward or backward of the group
  release,        // give the gather slot back
  open_gradient,  // take a gradient slot
  reduce,         // issue the reduction of the group's gradient: takes a scratch slot
  finish_reduce,  // wait for it; give gradient and scratch slots back
  update,         // reduce over zero1/zero2 and replicas, norm, update operations, encode (all groups)
};
std::string_view name_of(Action action);

struct Event {
  Action action;
  int64_t group = -1;      // -1: all
  bool backward = false;
  int64_t micro_batch = 0;
  bool operator==(const Event&) const = default;
};

std::vector<Event> schedule_of(const Plan& plan, int64_t micro_batches);

// Bytes of the three kinds of slots of a group. gather is 0 where zero3 == 1 (the runtime shard is the whole); scratch is
// what comm::Group::reduce_scratch_bytes asks for over zero2 ranks: all other members' slices.
struct SlotBytes {
  int64_t gather = 0, gradient = 0, scratch = 0;
};
SlotBytes slot_bytes(const Plan& plan, int64_t group);

// Sizes of the pool's slots after replaying one step (two micro-batches) from an empty pool.
std::vector<int64_t> pool_slots(const Plan& plan);

}  // namespace dovetail::plan
