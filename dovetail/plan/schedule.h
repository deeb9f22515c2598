// The order of one optimizer step: which group is gathered, computed, released and reduced when. The engine
// follows these rules as hooks fire; the planner replays them to size the slot pool and the simulator to
// price a step.
//
// Forward, at the start of group g: gather g unless under way, gather the next `prefetch` groups, compute g.
// At its end: release g unless it stays. Backward, at the start of g: the same with the groups before it,
// where g's gradient buffer is opened before g computes. But while max(1, pending_reductions) are in flight, the
// groups ahead wait until half of g's gradient has been written: then reductions are finished until fewer are in
// flight (oldest first), and gathers take the slots that this frees. At the end of g: release g, add the gradient to
// the local accumulator where there is one, finish reductions in the same way, start reducing g (and finish it at once
// when pending_reductions is 0). The root group is gathered before all others, released and reduced after all others.
// At the end of backward all reductions are finished.
//
// Prefetch counts only groups that the pass gathers. A group without elements takes part in nothing. With
// zero3 == 1 the runtime shard is the whole: nothing is gathered or released. With local accumulation over
// zero2 > 1 only the last micro-batch reduces, from the accumulator. Whether groups are frozen is not fixed
// by a plan and changes bytes only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dovetail/base/interval.h"
#include "dovetail/plan/format.h"
#include "dovetail/plan/plan.h"

namespace dovetail::plan {

enum class Action : uint8_t {
  refresh,        // runtime shard from main weights, over zero1/zero3 ranks (all groups, once a step)
  gather,         // issue the gather of a group's runtime parameters
  compute,        // wait for the gather; forward or backward of the group (the root group: the start of it)
  release,        // give the gather slot back
  open_gradient,  // take a gradient slot
  accumulate,     // add the gradient slot to the local accumulator; give the gradient slot back
  reduce,         // issue the reduction of the group's gradient (or accumulator): takes a slot of the scratch pool
  finish_reduce,  // wait for it; give the scratch slot and, if still held, the gradient slot back
  update,         // reduce over zero1/zero2 and replicas, norm, update operations (all groups)
};
std::string_view name_of(Action action);

struct Event {
  Action action;
  int64_t group = -1;      // -1: all
  bool backward = false;
  int64_t micro_batch = 0;
  bool operator==(const Event&) const = default;
};

// Throws ConfigError for fewer than one micro-batch.
std::vector<Event> schedule_of(const Plan& plan, int64_t micro_batches);

// What the rules come to for one group.
int64_t elements_of(const Plan& plan, int64_t group);          // of all its segments, with padding
bool gathers_in_forward(const Plan& plan, int64_t group);      // zero3 > 1 and elements
bool stays_gathered(const Plan& plan, int64_t group);          // gathered, kept by the plan, and read by its backward
bool gathers_in_backward(const Plan& plan, int64_t group);     // gathered, read by its backward, and did not stay
PlaneUse gathered_planes(const Plan& plan, int64_t group, bool backward);  // forward: all that is read while it stays
// The ranks of one group of this kind address one another's memory: its shards lie side by side, a gather moves no byte
// and takes no slot, a reduction reads its operands where they are and needs no scratch. False for groups of one rank.
bool shares_memory(const Plan& plan, RankGroup kind);
// Zero1 shards that are zero3 shards need no runtime shard: main weights are encoded into the own slice of the gather
// buffer each time. Not where they are the runtime shard, nor where nothing is gathered, nor where shards share memory.
bool encodes_at_gather(const Plan& plan, const Format& format);
bool accumulates_locally(const Plan& plan);                    // local_accumulation and zero2 > 1

// Bytes of the kinds of slots of a group, the same on all ranks. Segments lie one behind the other in a slot.
struct SlotBytes {
  int64_t gather = 0;    // planes of the pass that reads more; 0 where nothing is gathered or shards share memory
  int64_t gradient = 0;  // whole, in the format's gradient dtype
  int64_t scratch = 0;   // what comm::Group::reduce_scratch_bytes asks for over zero2 ranks: (zero2-1) own slices, each
                         // padded to 64 bytes; fp32 with local accumulation, else the format's gradient dtype
  int64_t update = 0;    // the larger of two at the update: reduce_scratch_bytes over zero1/zero2 ranks (fp32) and
                         // all_reduce_scratch_bytes over replicas; of the rank that needs most
};
SlotBytes slot_bytes(const Plan& plan, int64_t group);

// Sizes of slots, of two pools: what a gather or a gradient left would hold a larger slot than a reduction needs.
struct PoolSlots {
  std::vector<int64_t> buffers;  // gathers and gradients
  std::vector<int64_t> scratch;  // of reductions, in backward and at the update
  int64_t total() const;
  bool operator==(const PoolSlots&) const = default;
};

// After replaying steps of two micro-batches from empty pools until a step changes nothing. Groups are updated one
// after the other; a request of no bytes is not made.
PoolSlots pool_slots(const Plan& plan);

// How comm::Group::all_reduce cuts n elements among r members: slices of ceil(n/r) elements, rounded up to 64
// bytes of fp32; the last ones may be short or empty.
Interval all_reduce_slice(int64_t n, int64_t r, int64_t member);

}  // namespace dovetail::plan
