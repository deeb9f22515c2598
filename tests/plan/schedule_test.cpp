#include "dovetail/plan/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "dovetail/base/error.h"
#include "dovetail/layout/slot_policy.h"
#include "tests/plan/random_plan.h"

namespace dovetail::plan {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Three blocks of one 8x8 weight and a root of 16 elements; 2 ranks, everything sharded over both.
PlanOptions options() {
  PlanOptions o;
  o.world = 2;
  o.degrees = {2, 2, 2};
  o.alignment = 8;
  return o;
}

std::vector<GroupSpec> model() {
  std::vector<GroupSpec> groups;
  for (const char* name : {"a", "b", "c"}) groups.push_back({name, {{std::string(name) + ".w", {8, 8}}}});
  groups.push_back({"", {{"norm", {16}, ParamKind::vector}}});
  return groups;
}

// "F gather a", "B finish_reduce c", "update"; the root group is shown as "root".
std::vector<std::string> lines(const Plan& plan, const std::vector<Event>& events) {
  std::vector<std::string> text;
  for (const Event& e : events) {
    const std::string action(name_of(e.action));
    if (e.group < 0) {
      text.push_back(action);
      continue;
    }
    const std::string& name = plan.groups[e.group].name;
    text.push_back((e.backward ? "B " : "F ") + action + " " + (name.empty() ? "root" : name));
  }
  return text;
}

std::vector<std::string> lines_of_step(const PlanOptions& o, const std::vector<GroupSpec>& m) {
  const Plan plan = make_plan(o, m);
  return lines(plan, schedule_of(plan, 1));
}

TEST(Schedule, OneStep) {
  EXPECT_THAT(lines_of_step(options(), model()),
              ElementsAre("refresh",                                             //
                          "F gather root", "F gather a", "F compute root",             //
                          "F gather b", "F compute a", "F release a",                  //
                          "F gather c", "F compute b", "F release b",                  //
                          "F compute c",                                               // c and the root stay
                          "B gather b", "B open_gradient root", "B compute root",      // prefetch passes over c
                          "B open_gradient c", "B compute c", "B release c",           //
                          "B reduce c",                                                //
                          "B open_gradient b", "B compute b",                          //
                          "B finish_reduce c", "B gather a",                           // half of b's gradient is there
                          "B release b", "B reduce b",                                 //
                          "B open_gradient a", "B compute a",                          //
                          "B finish_reduce b", "B release a", "B reduce a",            //
                          "B release root", "B finish_reduce a", "B reduce root",      //
                          "B finish_reduce root", "update"));
}

TEST(Schedule, WithoutPrefetchAndPendingReductions) {
  PlanOptions o = options();
  o.prefetch = 0;
  o.pending_reductions = 0;
  std::vector<GroupSpec> m = model();
  m.pop_back();
  EXPECT_THAT(lines_of_step(o, m),
              ElementsAre("refresh",                                                                     //
                          "F gather a", "F compute a", "F release a",                                          //
                          "F gather b", "F compute b", "F release b",                                          //
                          "F gather c", "F compute c",                                                         //
                          "B open_gradient c", "B compute c", "B release c", "B reduce c", "B finish_reduce c",  //
                          "B gather b", "B open_gradient b", "B compute b", "B release b", "B reduce b",       //
                          "B finish_reduce b",                                                                 //
                          "B gather a", "B open_gradient a", "B compute a", "B release a", "B reduce a",       //
                          "B finish_reduce a", "update"));
}

TEST(Schedule, ABackwardThatReadsNothingGathersNothing) {
  std::vector<GroupSpec> m = model();
  m.pop_back();
  m[0].backward_needs_parameters = false;  // an embedding
  m[2].backward_needs_parameters = false;  // kept by its place, but nobody would read it
  const std::vector<std::string> step = lines_of_step(options(), m);
  EXPECT_THAT(step, testing::Contains("F release c"));
  EXPECT_THAT(step, testing::Not(testing::Contains("B gather a")));
  EXPECT_THAT(step, testing::Not(testing::Contains("B release c")));
  EXPECT_THAT(step, testing::Contains("B gather b"));
  EXPECT_THAT(step, testing::Contains("B reduce a"));
}

TEST(Schedule, NothingIsGatheredWhereTheShardIsTheWhole) {
  PlanOptions o = options();
  o.degrees = {2, 2, 1};
  std::vector<GroupSpec> m = model();
  m.resize(1);
  EXPECT_THAT(lines_of_step(o, m), ElementsAre("refresh", "F compute a", "B open_gradient a", "B compute a",
                                               "B reduce a", "B finish_reduce a", "update"));
}

TEST(Schedule, GroupsWithoutElementsTakePartInNothing) {
  std::vector<GroupSpec> m{{"a", {{"a.w", {8}}}}, {"b", {{"b.none", {0, 4}}}}, {"", {}}};
  for (const std::string& line : lines_of_step(options(), m)) {
    const bool empty_group = line.ends_with(" b") || line.ends_with(" root");
    EXPECT_EQ(empty_group, line == "F compute b" || line == "B compute b" || line == "F compute root" ||
                               line == "B compute root")
        << line;
  }
  EXPECT_THAT(lines_of_step(options(), {}), ElementsAre("refresh", "update"));
}

TEST(Schedule, LocalAccumulationReducesInTheLastMicroBatch) {
  PlanOptions o = options();
  o.local_accumulation = true;
  std::vector<GroupSpec> m = model();
  m.resize(1);
  const Plan plan = make_plan(o, m);
  EXPECT_THAT(lines(plan, schedule_of(plan, 2)),
              ElementsAre("refresh",                                                                       //
                          "F gather a", "F compute a", "B open_gradient a", "B compute a", "B release a",        //
                          "B accumulate a",                                                                      //
                          "F gather a", "F compute a", "B open_gradient a", "B compute a", "B release a",        //
                          "B accumulate a", "B reduce a", "B finish_reduce a", "update"));
  EXPECT_THROW(schedule_of(plan, 0), ConfigError);
}

TEST(SlotBytes, OfTheThreeKinds) {
  PlanOptions o = options();
  o.world = 16;
  o.degrees = {8, 4, 2};
  o.format = "bf16";
  // 64 elements in 8 units of 8: zero3 shard 32, zero2 shard 16, zero1 shard 8.
  const Plan plan = make_plan(o, model());
  const SlotBytes bytes = slot_bytes(plan, 0);
  EXPECT_EQ(bytes.gather, 128);
  EXPECT_EQ(bytes.gradient, 128);
  EXPECT_EQ(bytes.scratch, 3 * 64);  // three slices of 16 bf16, each padded from 32 bytes
  // Over zero1/zero2 = 2: one slice of 8 fp32; over 2 replicas: two slices, each padded to 64 bytes.
  EXPECT_EQ(bytes.update, 128);
  o.local_accumulation = true;
  EXPECT_EQ(slot_bytes(make_plan(o, model()), 0).scratch, 3 * 64);  // 16 fp32: 64 bytes without padding
  o.degrees = {1, 1, 1};
  o.world = 1;
  const SlotBytes alone = slot_bytes(make_plan(o, model()), 0);
  EXPECT_EQ(alone.gather, 0);
  EXPECT_EQ(alone.gradient, 128);
  EXPECT_EQ(alone.scratch, 0);
  EXPECT_EQ(alone.update, 0);
}

TEST(PoolSlots, OfTheStepAbove) {
  PlanOptions o = options();
  // Gathers and gradients: 256 bytes, the root 64; scratch half of that, 32 padded to 64 for the root.
  const Plan plan = make_plan(o, model());
  EXPECT_EQ(slot_bytes(plan, 0).gather, 256);
  EXPECT_EQ(slot_bytes(plan, 3).scratch, 64);
  // Forward takes slot 0 for the root, 1 for a, 2 for b, then 1 for c; the root and c stay.
  // Backward: 2 for b, new ones for the gradients of the root (3) and c (4). Slot 1 is given back and serves b's
  // gradient while c's is reduced. Half of it is written: c is done and its slot takes a. Everything later finds a
  // free one.
  EXPECT_THAT(pool_slots(plan).buffers, ElementsAre(64, 256, 256, 64, 256));
  EXPECT_THAT(pool_slots(plan).scratch, ElementsAre(128));
}

// Replays the events of a step on the given slots: what the engine does as its hooks fire.
class TestReplay {
 public:
  TestReplay(const Plan& plan, const PoolSlots& sizes)
      : plan_(plan), buffers_(sizes.buffers), scratch_(sizes.scratch) {}

  PoolSlots run(const std::vector<Event>& events) {
    for (const Event& e : events) {
      const SlotBytes bytes = e.group < 0 ? SlotBytes{} : slot_bytes(plan_, e.group);
      if (e.action == Action::gather) take(buffers_, "gather", e.group, bytes.gather);
      if (e.action == Action::open_gradient) take(buffers_, "gradient", e.group, bytes.gradient);
      if (e.action == Action::reduce) take(scratch_, "scratch", e.group, bytes.scratch);
      if (e.action == Action::release) give(buffers_, "gather", e.group);
      if (e.action == Action::accumulate) give(buffers_, "gradient", e.group);
      if (e.action == Action::finish_reduce) {
        give(scratch_, "scratch", e.group);
        if (slots_.contains({"gradient", e.group})) give(buffers_, "gradient", e.group);
      }
      if (e.action == Action::update) update();
    }
    EXPECT_TRUE(slots_.empty());
    return {buffers_.sizes(), scratch_.sizes()};
  }

 private:
  void take(SlotPolicy& policy, const std::string& kind, int64_t group, int64_t bytes) {
    ASSERT_FALSE(slots_.contains({kind, group}));
    if (bytes == 0) return;
    slots_[{kind, group}] = policy.acquire(bytes);
  }
  void give(SlotPolicy& policy, const std::string& kind, int64_t group) {
    const SlotBytes bytes = slot_bytes(plan_, group);
    const bool none = (kind == "gather" && bytes.gather == 0) || (kind == "scratch" && bytes.scratch == 0);
    ASSERT_EQ(slots_.contains({kind, group}), !none) << kind << group;
    if (none) return;
    policy.release(slots_[{kind, group}]);
    slots_.erase({kind, group});
  }
  void update() {
    for (int64_t g = 0; g < std::ssize(plan_.groups); ++g)
      if (const int64_t bytes = slot_bytes(plan_, g).update) scratch_.release(scratch_.acquire(bytes));
  }

  const Plan& plan_;
  SlotPolicy buffers_, scratch_;
  std::map<std::pair<std::string, int64_t>, int64_t> slots_;
};

// What holds for every step: who is gathered when it computes, how much is under way, that all is reduced once.
void check_step(const Plan& plan, int64_t micro_batches) {
  const std::vector<Event> events = schedule_of(plan, micro_batches);
  std::set<int64_t> gathered, in_flight;
  std::map<std::pair<int64_t, int64_t>, int> reduced, computed;  // (group, micro-batch)
  const int64_t pending = std::max(1, plan.options.pending_reductions);
  for (const Event& e : events) {
    const bool elements = e.group >= 0 && elements_of(plan, e.group) > 0;
    if (e.action == Action::gather) {
      ASSERT_TRUE(gathered.insert(e.group).second);
      ASSERT_TRUE(elements);
      ASSERT_GT(plan.options.degrees.zero3, 1);
    }
    if (e.action == Action::release) {
      ASSERT_EQ(gathered.erase(e.group), 1u);
    }
    if (e.action == Action::compute) {
      const bool reads = !e.backward || plan.groups[e.group].backward_needs_parameters;
      if (reads && elements && plan.options.degrees.zero3 > 1) {
        ASSERT_TRUE(gathered.contains(e.group));
      }
      ++computed[{e.group, e.micro_batch}];
    }
    if (e.action == Action::reduce) {
      ASSERT_TRUE(in_flight.insert(e.group).second);
      ASSERT_LE(std::ssize(in_flight), pending);
      ++reduced[{e.group, e.micro_batch}];
    }
    if (e.action == Action::finish_reduce) {
      ASSERT_EQ(in_flight.erase(e.group), 1u);
    }
  }
  ASSERT_THAT(gathered, IsEmpty());
  ASSERT_THAT(in_flight, IsEmpty());
  for (int64_t g = 0; g < std::ssize(plan.groups); ++g) {
    for (int64_t m = 0; m < micro_batches; ++m) {
      const bool reduces = elements_of(plan, g) > 0 && (!accumulates_locally(plan) || m == micro_batches - 1);
      ASSERT_EQ((reduced[{g, m}]), reduces ? 1 : 0);
      ASSERT_EQ((computed[{g, m}]), 2);
    }
  }
  ASSERT_EQ(events.front().action, Action::refresh);
  ASSERT_EQ(events.back().action, Action::update);
}

// Slots are never given to two at once and a second step asks for nothing new, whatever its number of micro-batches.
TEST(Schedule, RandomPlans) {
  RandomPlans random(23);
  for (int round = 0; round < 300; ++round) {
    const Plan plan = make_plan(random.options(), random.groups());
    SCOPED_TRACE(to_text(plan));
    const PoolSlots slots = pool_slots(plan);
    for (int64_t micro_batches : {1, 2, 3}) {
      check_step(plan, micro_batches);
      EXPECT_EQ(TestReplay(plan, slots).run(schedule_of(plan, micro_batches)), slots);
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace dovetail::plan
