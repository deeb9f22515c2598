#include "dovetail/plan/bytes.h"

#include <algorithm>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::plan {
namespace {

GridPosition checked_position(const Plan& plan, int64_t rank) {
  if (rank < 0 || rank >= plan.options.world)
    raise<ConfigError>("rank: wanted 0 to {}, got {}", plan.options.world - 1, rank);
  return position_of(plan.options.degrees, rank);
}

int64_t state_of(const SegmentLayout& s, Interval own, const std::vector<std::vector<StateShape>>& state) {
  int64_t bytes = 0;
  for (const Placement& p : s.placements)
    for (const StateShape& field : state[p.tensor])
      bytes += ceil_div(intersect(own, p.interval()).size(), field.per) * field.bytes;
  return bytes;
}

void check_shape(const Plan& plan, const StepShape& shape) {
  if (shape.micro_batches < 1) raise<ConfigError>("micro-batches: wanted at least 1, got {}", shape.micro_batches);
  if (!shape.trainable.empty() && shape.trainable.size() != plan.groups.size())
    raise<ConfigError>("trainable: wanted {} groups, got {}", plan.groups.size(), shape.trainable.size());
  if (!shape.synchronise_each && !plan.options.local_accumulation && plan.options.degrees.zero2 > 1)
    raise<ConfigError>("micro-batches that do not reduce: wanted local_accumulation, as zero2 is {}",
                       plan.options.degrees.zero2);
}

// Sent by one rank for one bucket's segment.
class SegmentTraffic {
 public:
  SegmentTraffic(const Plan& plan, const Format& format, const SegmentLayout& s, const GridPosition& position)
      : format_(format), s_(s), position_(position), in_place_(shares_memory(plan, RankGroup::gather)),
        replicas_(plan.options.world / s.zero1),
        own_(s.zero1_interval(zero1_shard(plan.options.degrees, position)).size()) {}

  int64_t refresh() const { return format_.bytes_of(own_) * (s_.zero1 / s_.zero3 - 1); }
  int64_t gather(PlaneUse planes) const {
    return in_place_ ? 0 : format_.bytes_of(s_.shard3, planes) * (s_.zero3 - 1);
  }
  int64_t reduce(int64_t item) const { return s_.shard2 * item * (s_.zero2 - 1); }
  int64_t reduce_main() const {
    const int64_t mine = all_reduce_slice(own_, replicas_, position_.replica).size();
    return 4 * (s_.shard2 - own_ + (own_ - mine) + (replicas_ - 1) * mine);
  }

 private:
  const Format& format_;
  const SegmentLayout& s_;
  const GridPosition& position_;
  bool in_place_;
  int64_t replicas_;
  int64_t own_;  // elements of the zero1 interval
};

}  // namespace

int64_t HeldBytes::total() const {
  return main + runtime + gradient + main_gradient + accumulator + state + slots + unit_state + staging + workspace;
}

int64_t SentBytes::total() const {
  return refresh + gather_forward + gather_backward + reduce + fragment + reduce_main;
}

HeldBytes held_bytes(const Plan& plan, int64_t rank, const std::vector<std::vector<StateShape>>& state) {
  if (state.size() != plan.tensors.size())
    raise<ConfigError>("state bytes: wanted {} tensors, got {}", plan.tensors.size(), state.size());
  const Degrees& d = plan.options.degrees;
  const int64_t q = zero1_shard(d, checked_position(plan, rank));
  HeldBytes held;
  for (const GroupPlan& group : plan.groups) {
    for (const BucketPlan& bucket : group.buckets) {
      const Format format = format_named(bucket.format);
      for (const SegmentLayout& s : bucket.segments) {
        const int64_t own = s.zero1_interval(q).size();
        if (!format.is_plain(plan.options.main)) held.main += own * size_of(plan.options.main);
        if (!encodes_at_gather(plan, format)) held.runtime += format.bytes_of(s.shard3);
        held.gradient += 4 * s.shard2;
        if (d.zero1 != d.zero2) held.main_gradient += 4 * own;
        if (accumulates_locally(plan)) held.accumulator += 4 * s.size();
        held.state += state_of(s, s.zero1_interval(q), state);
      }
    }
  }
  held.slots = pool_slots(plan).total();
  return held;
}

SentBytes sent_bytes(const Plan& plan, int64_t rank, const StepShape& shape) {
  check_shape(plan, shape);
  const GridPosition position = checked_position(plan, rank);
  const int64_t reductions = shape.synchronise_each ? shape.micro_batches : 1;
  SentBytes sent;
  for (int64_t g = 0; g < std::ssize(plan.groups); ++g) {
    const bool trainable = shape.trainable.empty() || shape.trainable[g];
    for (const BucketPlan& bucket : plan.groups[g].buckets) {
      const Format format = format_named(bucket.format);
      for (const SegmentLayout& s : bucket.segments) {
        const SegmentTraffic traffic(plan, format, s, position);
        sent.refresh += traffic.refresh();
        if (gathers_in_forward(plan, g))
          sent.gather_forward += shape.micro_batches * traffic.gather(gathered_planes(plan, g, false));
        if (gathers_in_backward(plan, g))
          sent.gather_backward += shape.micro_batches * traffic.gather(gathered_planes(plan, g, true));
        if (!trainable) continue;
        sent.reduce += reductions * traffic.reduce(accumulates_locally(plan) ? 4 : size_of(format.gradient));
        sent.reduce_main += traffic.reduce_main();
      }
    }
  }
  return sent;
}

}  // namespace dovetail::plan
