#include "dovetail/plan/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dovetail/base/error.h"
#include "dovetail/plan/schedule.h"
#include "tests/plan/random_plan.h"

namespace dovetail::plan {
namespace {

using testing::HasSubstr;

// Shard numbers of an element, from the definition of a segment.
struct ShardsOf {
  int64_t s1, s2, s3;
  ShardsOf(const SegmentLayout& l, int64_t element)
      : s1(element / l.shard2 * (l.zero1 / l.zero2) + element % l.shard2 / l.shard1), s2(element / l.shard2),
        s3(element / l.shard3) {}
};

// Counts by walking over all elements and all ranks; slow, and shares no formula with the library.
class Walk {
 public:
  Walk(const Plan& plan, int64_t rank) : plan_(plan), d_(plan.options.degrees), rank_(rank), me_(shards(rank)) {}

  int64_t runtime_item() const { return plan_.options.format == "bf16" ? 2 : 4; }
  int64_t main_item() const { return plan_.options.main == DType::bf16 ? 2 : 4; }

  template <class Visit>
  void each_element(Visit visit) const {
    for (int64_t g = 0; g < std::ssize(plan_.groups); ++g)
      for (const BucketPlan& b : plan_.groups[g].buckets)
        for (const SegmentLayout& s : b.segments)
          for (int64_t e = 0; e < s.size(); ++e) visit(g, b, ShardsOf(s, e));
  }

  HeldBytes held(const std::vector<std::vector<StateShape>>& state) const {
    HeldBytes h;
    for (const GroupPlan& g : plan_.groups)
      for (const BucketPlan& b : g.buckets)
        for (const SegmentLayout& s : b.segments)
          for (const Placement& p : s.placements)
            for (const StateShape& field : state[p.tensor])
              for (int64_t i = 0; i < p.numel; i += field.per)  // a value lies where its first element does
                if (ShardsOf(s, p.offset + i).s1 == me_.zero1) h.state += field.bytes;
    each_element([&](int64_t, const BucketPlan&, ShardsOf at) {
      if (at.s1 == me_.zero1) {
        if (main_item() != runtime_item()) h.main += main_item();
        if (d_.zero1 > d_.zero2) h.main_gradient += 4;
      }
      const bool has_runtime = d_.zero3 == 1 || d_.zero1 > d_.zero3 || main_item() == runtime_item();
      if (at.s3 == me_.zero3 && has_runtime) h.runtime += runtime_item();
      if (at.s2 == me_.zero2) h.gradient += 4;
      if (plan_.options.local_accumulation && d_.zero2 > 1) h.accumulator += 4;
    });
    h.slots = pool_slots(plan_).total();
    return h;
  }

  // An element travels once for every peer that needs it from this rank.
  SentBytes sent(const StepShape& shape) const {
    SentBytes s;
    const auto gather = peers(RankGroup::gather), refresh = peers(RankGroup::refresh);
    const auto reduce = peers(RankGroup::reduce), reduce_main = peers(RankGroup::reduce_main);
    const int64_t reductions = shape.synchronise_each ? shape.micro_batches : 1;
    const int64_t reduced_item = plan_.options.local_accumulation && d_.zero2 > 1 ? 4 : runtime_item();
    each_element([&](int64_t g, const BucketPlan&, ShardsOf at) {
      const GroupPlan& group = plan_.groups[g];
      const bool trainable = shape.trainable.empty() || shape.trainable[g];
      if (at.s1 == me_.zero1) s.refresh += runtime_item() * std::ssize(refresh);
      if (at.s3 == me_.zero3) {
        s.gather_forward += shape.micro_batches * runtime_item() * std::ssize(gather);
        if (group.backward_needs_parameters && !group.keep_after_forward)
          s.gather_backward += shape.micro_batches * runtime_item() * std::ssize(gather);
      }
      for (int64_t peer : reduce)
        if (trainable && at.s2 == shards(peer).zero2) s.reduce += reductions * reduced_item;
      for (int64_t peer : reduce_main)
        if (trainable && at.s2 == me_.zero2 && at.s1 == shards(peer).zero1) s.reduce_main += 4;
    });
    for (int64_t g = 0; g < std::ssize(plan_.groups); ++g)
      if (shape.trainable.empty() || shape.trainable[g]) s.reduce_main += all_reduced(plan_.groups[g]);
    return s;
  }

 private:
  struct Shards {
    int64_t zero1, zero2, zero3;
  };

  Shards shards(int64_t rank) const {
    const GridPosition p = position_of(d_, rank);
    return {zero1_shard(d_, p), zero2_shard(d_, p), zero3_shard(d_, p)};
  }

  // The other members of this rank's group.
  std::vector<int64_t> peers(RankGroup kind) const {
    std::vector<int64_t> found;
    for (const std::vector<int>& group : rank_groups(d_, plan_.options.world, kind))
      if (std::find(group.begin(), group.end(), rank_) != group.end())
        for (int member : group)
          if (member != rank_) found.push_back(member);
    return found;
  }

  // Reduce-scatter, then all-gather, of the zero1 shard: each replica takes whole lines of 16 fp32.
  int64_t all_reduced(const GroupPlan& group) const {
    const int64_t replicas = plan_.options.world / d_.zero1, mine = rank_ / d_.zero1;
    int64_t bytes = 0;
    for (const BucketPlan& b : group.buckets) {
      for (const SegmentLayout& s : b.segments) {
        int64_t n = 0;
        for (int64_t e = 0; e < s.size(); ++e) n += ShardsOf(s, e).s1 == me_.zero1;
        int64_t lines = 1;
        while (lines * 16 * replicas < n) ++lines;
        for (int64_t e = 0; e < n; ++e) {
          const int64_t owner = e / (lines * 16);
          bytes += owner == mine ? 4 * (replicas - 1) : 4;
        }
      }
    }
    return replicas == 1 ? 0 : bytes;
  }

  const Plan& plan_;
  Degrees d_;
  int64_t rank_;
  Shards me_;
};

std::vector<int64_t> shown(const HeldBytes& h) {
  return {h.main, h.runtime, h.gradient, h.main_gradient, h.accumulator, h.state, h.slots, h.total()};
}

std::vector<int64_t> shown(const SentBytes& s) {
  return {s.refresh, s.gather_forward, s.gather_backward, s.reduce, s.reduce_main, s.total()};
}

TEST(Bytes, RandomPlansAgainstAWalkOverElementsAndRanks) {
  RandomPlans random(41);
  for (int round = 0; round < 120; ++round) {
    const Plan plan = make_plan(random.options(), random.groups());
    SCOPED_TRACE(to_text(plan));
    std::map<int64_t, int64_t> block;
    for (const GroupPlan& g : plan.groups)
      for (const BucketPlan& b : g.buckets)
        for (const SegmentLayout& s : b.segments)
          for (const Placement& p : s.placements) block[p.tensor] = p.block;
    std::vector<std::vector<StateShape>> state;
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      state.push_back({{random.one_of<int64_t>({1, 4}), 1}});
      if (random.flip()) state.back().push_back({4, block[t]});
    }
    StepShape shape{.micro_batches = random.pick(1, 3), .synchronise_each = true, .trainable = {}};
    if (plan.options.local_accumulation) shape.synchronise_each = random.flip();
    if (random.flip())
      for (size_t g = 0; g < plan.groups.size(); ++g) shape.trainable.push_back(random.flip());
    for (int64_t rank = 0; rank < plan.options.world; ++rank) {
      const Walk walk(plan, rank);
      const HeldBytes held = held_bytes(plan, rank, state), counted = walk.held(state);
      ASSERT_EQ(shown(held), shown(counted)) << "rank " << rank;
      const SentBytes sent = sent_bytes(plan, rank, shape), walked = walk.sent(shape);
      ASSERT_EQ(shown(sent), shown(walked)) << "rank " << rank;
    }
  }
}

// One block of 1024 elements and a root of 64 on four ranks, all sharded four times.
Plan zero3_plan(PlanOptions o) {
  o.world = 4;
  o.degrees = {4, 4, 4};
  return make_plan(o, {{"a", {{"a.w", {32, 32}}}},
                       {"b", {{"b.w", {32, 32}}}},
                       {"", {{"n", {64}, ParamKind::vector}}}});
}

TEST(Bytes, ZeroThreeByHand) {
  PlanOptions o;
  o.format = "bf16";
  const Plan plan = zero3_plan(o);
  // The root's 64 elements, one unit, make shards of 64: three of them padding.
  const HeldBytes held = held_bytes(plan, 1, {{{8}}, {{8}}, {{8}}});
  EXPECT_EQ(held.main, 4 * (256 + 256 + 64));
  EXPECT_EQ(held.runtime, 0);  // encoded into the gather slots
  EXPECT_EQ(held.gradient, 4 * (256 + 256 + 64));
  EXPECT_EQ(held.main_gradient, 0);
  EXPECT_EQ(held.accumulator, 0);
  EXPECT_EQ(held.state, 8 * (256 + 256));  // the root's elements lie on rank 0
  const StepShape shape{.micro_batches = 2, .synchronise_each = true, .trainable = {true, false, true}};
  const SentBytes sent = sent_bytes(plan, 1, shape);
  EXPECT_EQ(sent.refresh, 0);
  EXPECT_EQ(sent.gather_forward, 2 * 3 * 2 * (256 + 256 + 64));
  EXPECT_EQ(sent.gather_backward, 2 * 3 * 2 * 256);  // b and the root stay
  EXPECT_EQ(sent.reduce, 2 * 3 * 2 * (256 + 64));    // b is frozen
  EXPECT_EQ(sent.reduce_main, 0);
}

TEST(Bytes, MainWeightsThatAreTheRuntimeShardTakeNothing) {
  PlanOptions o;
  EXPECT_EQ(held_bytes(zero3_plan(o), 0, {{}, {}, {}}).main, 0);
  o.main = DType::bf16;
  EXPECT_GT(held_bytes(zero3_plan(o), 0, {{}, {}, {}}).main, 0);
  o.format = "bf16";
  EXPECT_EQ(held_bytes(zero3_plan(o), 0, {{}, {}, {}}).main, 0);
}

TEST(Bytes, LocalAccumulationReducesOnceInFp32) {
  PlanOptions o;
  o.format = "bf16";
  o.local_accumulation = true;
  const Plan plan = zero3_plan(o);
  EXPECT_EQ(held_bytes(plan, 2, {{}, {}, {}}).accumulator, 4 * 4 * (256 + 256 + 64));
  EXPECT_EQ(sent_bytes(plan, 2, {.micro_batches = 5, .synchronise_each = false, .trainable = {}}).reduce,
            3 * 4 * (256 + 256 + 64));
}

TEST(Bytes, BadRequestsAreNamed) {
  const Plan plan = zero3_plan({});
  const auto error = [](auto call) -> std::string {
    try {
      call();
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(error([&] { held_bytes(plan, 0, {{}}); }), HasSubstr("state bytes: wanted 3 tensors, got 1"));
  EXPECT_THAT(error([&] { held_bytes(plan, 4, {{}, {}, {}}); }), HasSubstr("rank: wanted 0 to 3, got 4"));
  EXPECT_THAT(error([&] { sent_bytes(plan, -1, {}); }), HasSubstr("rank: wanted 0 to 3, got -1"));
  const StepShape none{.micro_batches = 0, .synchronise_each = true, .trainable = {}};
  EXPECT_THAT(error([&] { sent_bytes(plan, 0, none); }), HasSubstr("micro-batches"));
  const StepShape short_list{.micro_batches = 1, .synchronise_each = true, .trainable = {true}};
  EXPECT_THAT(error([&] { sent_bytes(plan, 0, short_list); }), HasSubstr("trainable: wanted 3 groups, got 1"));
  const StepShape unsynchronised{.micro_batches = 2, .synchronise_each = false, .trainable = {}};
  EXPECT_THAT(error([&] { sent_bytes(plan, 0, unsynchronised); }), HasSubstr("local_accumulation"));
}

}  // namespace
}  // namespace dovetail::plan
