#include "dovetail/plan/schedule.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/layout/slot_policy.h"

namespace dovetail::plan {
namespace {

constexpr int64_t kPaddedBytes = 64;  // of slices in comm's scratch

// Writes the events of one step as the rules of the header have them.
class Recorder {
 public:
  explicit Recorder(const Plan& plan) : plan_(plan), under_way_(plan.groups.size(), false) {
    const int64_t count = std::ssize(plan.groups);
    const bool root = count > 0 && plan.groups.back().name.empty();
    for (int64_t g = 0; g < count - root; ++g) forward_order_.push_back(g);
    backward_order_.assign(forward_order_.rbegin(), forward_order_.rend());
    if (root) {
      forward_order_.insert(forward_order_.begin(), count - 1);
      backward_order_.insert(backward_order_.begin(), count - 1);
    }
    has_root_ = root;
  }

  std::vector<Event> record(int64_t micro_batches) {
    add(Action::refresh, -1);
    for (micro_batch_ = 0; micro_batch_ < micro_batches; ++micro_batch_) {
      reduces_ = !accumulates_locally(plan_) || micro_batch_ == micro_batches - 1;
      forward();
      backward();
    }
    micro_batch_ = micro_batches - 1;
    backward_ = false;
    add(Action::update, -1);
    return std::move(events_);
  }

 private:
  void add(Action action, int64_t group) { events_.push_back({action, group, backward_, micro_batch_}); }

  bool gathers(int64_t group) const {
    return backward_ ? gathers_in_backward(plan_, group) : gathers_in_forward(plan_, group);
  }

  void gather(int64_t group) {
    if (under_way_[group]) return;
    under_way_[group] = true;
    add(Action::gather, group);
  }

  void release(int64_t group) {
    if (!under_way_[group]) return;
    under_way_[group] = false;
    add(Action::release, group);
  }

  void gather_own(int64_t group) {
    if (gathers(group)) gather(group);
  }

  // Gathers the next `prefetch` groups after order[at].
  void gather_ahead(const std::vector<int64_t>& order, size_t at) {
    int ahead = 0;
    for (size_t next = at + 1; next < order.size() && ahead < plan_.options.prefetch; ++next) {
      if (!gathers(order[next])) continue;
      gather(order[next]);
      ++ahead;
    }
  }

  void forward() {
    backward_ = false;
    for (size_t at = 0; at < forward_order_.size(); ++at) {
      const int64_t group = forward_order_[at];
      gather_own(group);
      gather_ahead(forward_order_, at);
      add(Action::compute, group);
      if (!(has_root_ && at == 0)) end_forward(group);
    }
    if (has_root_) end_forward(forward_order_[0]);
  }

  void end_forward(int64_t group) {
    if (!stays_gathered(plan_, group)) release(group);
  }

  void backward() {
    backward_ = true;
    for (size_t at = 0; at < backward_order_.size(); ++at) {
      const int64_t group = backward_order_[at];
      gather_own(group);
      const bool waits = elements_of(plan_, group) > 0 && std::ssize(in_flight_) >= most_in_flight();
      if (!waits) gather_ahead(backward_order_, at);
      if (elements_of(plan_, group) > 0) add(Action::open_gradient, group);
      add(Action::compute, group);
      if (waits) {
        finish_until(most_in_flight() - 1);
        gather_ahead(backward_order_, at);
      }
      if (!(has_root_ && at == 0)) end_backward(group);
    }
    if (has_root_) end_backward(backward_order_[0]);
    finish_until(0);
  }

  void end_backward(int64_t group) {
    release(group);
    if (elements_of(plan_, group) == 0) return;
    if (accumulates_locally(plan_)) add(Action::accumulate, group);
    if (!reduces_) return;
    finish_until(most_in_flight() - 1);
    add(Action::reduce, group);
    in_flight_.push_back(group);
    if (plan_.options.pending_reductions == 0) finish_until(0);
  }

  int64_t most_in_flight() const { return std::max(1, plan_.options.pending_reductions); }

  void finish_until(int64_t left) {
    while (std::ssize(in_flight_) > left) {
      add(Action::finish_reduce, in_flight_.front());
      in_flight_.pop_front();
    }
  }

  const Plan& plan_;
  std::vector<int64_t> forward_order_, backward_order_;  // the root group first in both
  bool has_root_ = false;
  std::vector<bool> under_way_;  // gathered or being gathered
  std::deque<int64_t> in_flight_;
  std::vector<Event> events_;
  bool backward_ = false, reduces_ = true;
  int64_t micro_batch_ = 0;
};

// The slots that one step takes and gives back.
class Replay {
 public:
  Replay(const std::vector<SlotBytes>& bytes, const PoolSlots& sizes)
      : bytes_(bytes), buffers_(sizes.buffers), scratch_(sizes.scratch) {}

  void run(const Event& e) {
    switch (e.action) {
      case Action::gather: buffers_.take(gathered_, e.group, bytes_[e.group].gather); break;
      case Action::release: buffers_.give_back(gathered_, e.group); break;
      case Action::open_gradient: buffers_.take(gradients_, e.group, bytes_[e.group].gradient); break;
      case Action::accumulate: buffers_.give_back(gradients_, e.group); break;
      case Action::reduce: scratch_.take(reduced_, e.group, bytes_[e.group].scratch); break;
      case Action::finish_reduce:
        scratch_.give_back(reduced_, e.group);
        buffers_.give_back(gradients_, e.group);
        break;
      case Action::update:
        for (const SlotBytes& b : bytes_)
          if (b.update > 0) scratch_.policy.release(scratch_.policy.acquire(b.update));
        break;
      case Action::refresh:
      case Action::compute: break;
    }
  }

  PoolSlots sizes() const {
    DT_CHECK_EQ(buffers_.policy.in_use_count() + scratch_.policy.in_use_count(), 0);
    return {buffers_.policy.sizes(), scratch_.policy.sizes()};
  }

 private:
  using Slots = std::map<int64_t, int64_t>;  // by group

  struct Pool {
    explicit Pool(const std::vector<int64_t>& sizes) : policy(sizes) {}

    void take(Slots& slots, int64_t group, int64_t bytes) {
      if (bytes > 0) slots[group] = policy.acquire(bytes);
    }

    void give_back(Slots& slots, int64_t group) {
      const auto slot = slots.find(group);
      if (slot == slots.end()) return;
      policy.release(slot->second);
      slots.erase(slot);
    }

    SlotPolicy policy;
  };

  const std::vector<SlotBytes>& bytes_;
  Pool buffers_, scratch_;
  Slots gathered_, gradients_, reduced_;
};

int64_t reduce_scratch(int64_t members, int64_t own_bytes) { return (members - 1) * round_up(own_bytes, kPaddedBytes); }

int64_t update_scratch(const Plan& plan, const SegmentLayout& s) {
  const Degrees& d = plan.options.degrees;
  const int64_t replicas = plan.options.world / d.zero1;
  const int64_t own = round_up(all_reduce_slice(s.shard1, replicas, 0).size() * 4, kPaddedBytes);
  const int64_t slices = replicas == 1 ? 0 : shares_memory(plan, RankGroup::replica) ? 1 : replicas;
  const int64_t reduce =
      shares_memory(plan, RankGroup::reduce_main) ? 0 : reduce_scratch(d.zero1 / d.zero2, s.shard1 * 4);
  return std::max(reduce, slices * own);
}

}  // namespace

std::string_view name_of(Action action) {
  switch (action) {
    case Action::refresh: return "refresh";
    case Action::gather: return "gather";
    case Action::compute: return "compute";
    case Action::release: return "release";
    case Action::open_gradient: return "open_gradient";
    case Action::accumulate: return "accumulate";
    case Action::reduce: return "reduce";
    case Action::finish_reduce: return "finish_reduce";
    case Action::update: return "update";
  }
  return "?";
}

std::vector<Event> schedule_of(const Plan& plan, int64_t micro_batches) {
  if (micro_batches < 1) raise<ConfigError>("micro-batches: wanted at least 1, got {}", micro_batches);
  return Recorder(plan).record(micro_batches);
}

int64_t elements_of(const Plan& plan, int64_t group) {
  int64_t n = 0;
  for (const BucketPlan& bucket : plan.groups.at(group).buckets)
    for (const SegmentLayout& s : bucket.segments) n += s.size();
  return n;
}

bool gathers_in_forward(const Plan& plan, int64_t group) {
  return plan.options.degrees.zero3 > 1 && elements_of(plan, group) > 0;
}

bool stays_gathered(const Plan& plan, int64_t group) {
  const GroupPlan& g = plan.groups.at(group);
  return gathers_in_forward(plan, group) && g.keep_after_forward && g.backward_needs_parameters;
}

bool gathers_in_backward(const Plan& plan, int64_t group) {
  return gathers_in_forward(plan, group) && plan.groups.at(group).backward_needs_parameters &&
         !stays_gathered(plan, group);
}

PlaneUse gathered_planes(const Plan& plan, int64_t group, bool backward) {
  return {.forward = !backward, .backward = backward || stays_gathered(plan, group)};
}

bool shares_memory(const Plan& plan, RankGroup kind) {
  const Degrees& d = plan.options.degrees;
  int64_t members = 1, span = 1;  // ranks in a group, and in the aligned run of ranks around it
  switch (kind) {
    case RankGroup::gather: members = span = d.zero3; break;
    case RankGroup::reduce: members = span = d.zero2; break;
    case RankGroup::refresh: members = d.zero1 / d.zero3, span = d.zero1; break;
    case RankGroup::reduce_main: members = d.zero1 / d.zero2, span = d.zero1; break;
    case RankGroup::replica: members = plan.options.world / d.zero1, span = plan.options.world; break;
    case RankGroup::main: members = span = d.zero1; break;
  }
  return members > 1 && plan.options.host_ranks % span == 0;
}

bool encodes_at_gather(const Plan& plan, const Format& format) {
  const Degrees& d = plan.options.degrees;
  return d.zero3 > 1 && d.zero1 == d.zero3 && !shares_memory(plan, RankGroup::gather) &&
         !format.is_plain(plan.options.main);
}

bool accumulates_locally(const Plan& plan) { return plan.options.local_accumulation && plan.options.degrees.zero2 > 1; }

SlotBytes slot_bytes(const Plan& plan, int64_t group) {
  SlotBytes sum;
  int64_t backward_gather = 0;
  const bool in_place = shares_memory(plan, RankGroup::gather), reads_peers = shares_memory(plan, RankGroup::reduce);
  for (const BucketPlan& bucket : plan.groups.at(group).buckets) {
    const Format format = format_named(bucket.format);
    const int64_t reduced = accumulates_locally(plan) ? 4 : size_of(format.gradient);
    for (const SegmentLayout& s : bucket.segments) {
      if (gathers_in_forward(plan, group) && !in_place)
        sum.gather += format.bytes_of(s.size(), gathered_planes(plan, group, false));
      if (gathers_in_backward(plan, group) && !in_place)
        backward_gather += format.bytes_of(s.size(), gathered_planes(plan, group, true));
      sum.gradient += s.size() * size_of(format.gradient);
      if (!reads_peers) sum.scratch += reduce_scratch(s.zero2, s.shard2 * reduced);
      sum.update += update_scratch(plan, s);
    }
  }
  sum.gather = std::max(sum.gather, backward_gather);
  return sum;
}

int64_t PoolSlots::total() const {
  return std::accumulate(scratch.begin(), scratch.end(),
                         std::accumulate(buffers.begin(), buffers.end(), int64_t{0}));
}

PoolSlots pool_slots(const Plan& plan) {
  const std::vector<Event> events = schedule_of(plan, 2);
  std::vector<SlotBytes> bytes;
  for (int64_t g = 0; g < std::ssize(plan.groups); ++g) bytes.push_back(slot_bytes(plan, g));
  PoolSlots sizes, before;
  do {
    before = sizes;
    Replay replay(bytes, sizes);
    for (const Event& e : events) replay.run(e);
    sizes = replay.sizes();
  } while (sizes != before);
  return sizes;
}

Interval all_reduce_slice(int64_t n, int64_t r, int64_t member) {
  const int64_t each = round_up(ceil_div(n, r), kPaddedBytes / 4);
  return {std::min(n, each * member), std::min(n, each * (member + 1))};
}

}  // namespace dovetail::plan
