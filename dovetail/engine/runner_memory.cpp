// What a runner takes and gives back of memory as passes go.
#include <algorithm>
#include <map>

#include "dovetail/engine/runner.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::engine_detail {

// For groups of the same shards, as a transformer's blocks are, where there are more of them than slots. The root stays
// gathered from forward to backward, and so may others.
void Runner::make_gather_slots() {
  if (!in_place_) return;
  const int count = GatherSlots::count(context_.plan.options.prefetch);
  std::map<std::vector<std::pair<int64_t, int64_t>>, std::vector<ShardGroup*>> alike;
  for (int64_t g = 0; g < std::ssize(groups_); ++g) {
    if (root_is(g) || !groups_[g]->encodes_into_place() || plan::stays_gathered(context_.plan, g)) continue;
    std::vector<std::pair<int64_t, int64_t>> shards;
    for (const GroupSegment& s : groups_[g]->segments()) shards.emplace_back(s.whole_offset[0], s.layout->shard3);
    alike[shards].push_back(groups_[g].get());
  }
  for (const auto& [shards, groups] : alike) {
    if (std::ssize(groups) <= count) continue;
    gather_slots_.push_back(std::make_unique<GatherSlots>(
        *context_.ranks.gather, context_.shared_allocator(), groups[0]->whole_bytes(), groups[0]->own_bytes(), count,
        context_.identity(comm::Phase::control, -1)));
    for (ShardGroup* group : groups) group->use_slots(*gather_slots_.back());
  }
}

// The largest group comes first in many backward passes (a head): what only it needs is free for gradient shards, and
// for activations until the root is written, at the end.
void Runner::trim_pools() {
  int64_t buffer = 0, scratch = 0;
  bool more = false, gathers = false;
  for (size_t i = next_; i < queue_.size(); ++i) {
    const int64_t g = queue_[i];
    if (!context_.plan.groups[g].backward_needs_parameters) continue;  // an embedding, which writes few rows
    more = true;
    gathers |= plan::gathers_in_backward(context_.plan, g) && !runs_[g].gathered_backward;
    const plan::SlotBytes& bytes = groups_[g]->slot_bytes();
    if (groups_[g]->gradient_state() == GradientState::closed && !root_is(g))  // else it has its slot
      buffer = std::max({buffer, bytes.gather, bytes.gradient});
    scratch = std::max(scratch, bytes.scratch);
  }
  // Where nothing travels, one group is written at a time.
  const bool one = in_place_ && context_.plan.options.pending_reductions == 0;
  if (more) context_.pool->trim(buffer, one ? 1 : std::ssize(context_.pool->sizes()));
  if (scratch > 0) context_.scratch_pool->trim(scratch);
  if (!gathers) trim_gather_slots();
}

void Runner::trim_gather_slots() {
  for (auto& slots : gather_slots_) slots->trim();
}

// Between passes: pages of gradients would lie idle beside the activations of the forward.
void Runner::trim_gradients() {
  int64_t gather = 0;
  for (const auto& group : groups_) gather = std::max(gather, group->slot_bytes().gather);
  context_.pool->trim(gather);
}

// After more was gathered at once than a step ever does.
void Runner::restore_pools() {
  if (context_.pool->in_use() == 0) context_.pool->restore();
}

}  // namespace dovetail::engine_detail
