#include "dovetail/plan/ragged.h"

#include <gtest/gtest.h>

#include <random>

#include "brute_force.h"
#include "dovetail/base/error.h"

namespace dovetail::plan {
namespace {

RaggedProblem flat(int64_t shards, std::vector<RaggedTensor> tensors, int segments = 1) {
  return {std::move(tensors), {shards, shards, shards}, segments, {}};
}

int64_t cost_of(const RaggedProblem& p, const RaggedPlan& plan) {
  return p.weights.zero3 * plan.shard3() + p.weights.zero1 * plan.shard1();
}

std::vector<RaggedTensor> rigid(std::vector<int64_t> extents) {
  std::vector<RaggedTensor> r;
  for (int64_t e : extents) r.push_back({e, e});
  return r;
}

struct Instance {
  RaggedProblem problem;
  int64_t shard;
};

TEST(Ragged, InstancesWithKnownOptima) {
  const std::vector<Instance> instances{
      {flat(5, {{12, 6}, {16, 4}, {16, 4}, {2, 2}, {6, 6}}), 12},
      {flat(5, {{6, 1}, {18, 4}, {13, 4}, {12, 3}}), 11},
      {flat(5, {{20, 7}, {2, 2}, {6, 6}, {18, 6}, {12, 2}}), 13},
      {flat(16, {{120, 6}, {120, 4}, {10, 1}}), 24},
      {flat(16, {{120, 6}, {120, 4}, {10, 1}}, 2), 20},
      {flat(3, rigid({12, 11, 10, 7, 6, 5, 4, 4})), 20},
  };
  for (size_t i = 0; i < instances.size(); ++i) {
    const RaggedPlan plan = plan_ragged(instances[i].problem);
    EXPECT_EQ(plan.shard1(), instances[i].shard) << "instance " << i + 1;
    EXPECT_EQ(plan.shard3(), instances[i].shard);
    EXPECT_TRUE(plan.exact) << "instance " << i + 1;
    EXPECT_EQ(plan.bound1, instances[i].shard);
  }
}

TEST(Ragged, NestedInstanceNeedsTwoRadices) {
  const RaggedProblem problem{{{30, 6}, {16, 4}, {16, 8}, {12, 2}}, {4, 2, 2}, 1, {}};
  const RaggedPlan plan = plan_ragged(problem);
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].shard3, 38);
  EXPECT_EQ(plan.segments[0].shard2, 38);
  EXPECT_EQ(plan.segments[0].shard1, 20);
  EXPECT_TRUE(plan.exact);
  // One radix: the fine level alone.
  EXPECT_EQ(plan_ragged(flat(4, problem.tensors)).shard1(), 20);
}

// A block of Llama-3.1-8B under 128-row blocks, one unit = 64 elements.
TEST(Ragged, LlamaBlockOf128Rows) {
  const int64_t h = 4096 / 64, f = 14336 / 64;
  const std::vector<RaggedTensor> block{{4096 * h, 128 * h},
                                        {1024 * h, 128 * h},
                                        {1024 * h, 128 * h},
                                        {4096 * h, 128 * h},
                                        {14336 * h, 128 * h},
                                        {14336 * h, 128 * h},
                                        {4096 * f, 128 * f},
                                        {h, 1},
                                        {h, 1}};
  const RaggedPlan one = plan_ragged(flat(8, block));
  EXPECT_EQ(one.shard1() * 64, 29'360'128);
  const RaggedPlan three = plan_ragged(flat(8, block, 3));
  EXPECT_EQ(three.shard1() * 64, 27'264'000);
  EXPECT_EQ(three.bound1 * 64, 27'264'000);
  EXPECT_TRUE(three.exact);
}

RaggedTensor random_tensor(std::mt19937& random, int64_t longest) {
  const int64_t extent = 1 + random() % longest;
  return {extent, random() % 4 == 0
                      ? extent
                      : 1 + static_cast<int64_t>(random() % std::min<int64_t>(extent, 6))};
}

// plan >= optimum >= bound, and equal wherever the plan says that it is exact.
void expect_consistent(const RaggedProblem& p, int& exact) {
  const RaggedPlan plan = plan_ragged(p);
  const int64_t optimum = brute::least_cost(p), cost = cost_of(p, plan);
  std::string text;
  for (const RaggedTensor& t : p.tensors) text += fmt::format("({},{})", t.extent, t.block);
  text += fmt::format(" zero {},{},{} K {}", p.degrees.zero1, p.degrees.zero2, p.degrees.zero3,
                      p.max_segments);
  ASSERT_GE(cost, optimum) << text;
  ASSERT_LE(p.weights.zero3 * plan.bound3 + p.weights.zero1 * plan.bound1, optimum) << text;
  if (!plan.exact) return;
  ++exact;
  ASSERT_EQ(cost, optimum) << text;
}

TEST(Ragged, OneSegmentAgainstBruteForce) {
  std::mt19937 random(1);
  int exact = 0;
  for (int n = 0; n < 2500 && !HasFatalFailure(); ++n) {
    RaggedProblem p = flat(1 + random() % 6, {});
    for (int count = 1 + random() % 5; count > 0; --count)
      p.tensors.push_back(random_tensor(random, 9));
    expect_consistent(p, exact);
  }
  EXPECT_EQ(exact, 2500);  // tiny instances are always decided
}

TEST(Ragged, NestedDegreesAgainstBruteForce) {
  std::mt19937 random(2);
  int exact = 0;
  for (int n = 0; n < 3000 && !HasFatalFailure(); ++n) {
    RaggedProblem p;
    p.degrees.zero3 = 1 + random() % 3;
    p.degrees.zero2 = p.degrees.zero3 * (1 + random() % 2);
    p.degrees.zero1 = p.degrees.zero2 * (1 + random() % 3);
    p.weights = {1 + static_cast<int64_t>(random() % 3), 1 + static_cast<int64_t>(random() % 2)};
    for (int count = 1 + random() % 4; count > 0; --count)
      p.tensors.push_back(random_tensor(random, 9));
    expect_consistent(p, exact);
  }
  EXPECT_GE(exact, 2900);
}

TEST(Ragged, SegmentsAgainstBruteForce) {
  std::mt19937 random(3);
  int exact = 0;
  for (int n = 0; n < 1500 && !HasFatalFailure(); ++n) {
    RaggedProblem p = flat(1 + random() % 5, {}, 2 + random() % 2);
    if (n % 3 == 0) p.degrees.zero1 *= 2;
    for (int count = 1 + random() % 4; count > 0; --count)
      p.tensors.push_back(random_tensor(random, 8));
    expect_consistent(p, exact);
  }
  EXPECT_GE(exact, 900);
}

TEST(Ragged, ManyTypesAndManyEqualTensorsStayLegal) {
  std::mt19937 random(4);
  for (int n = 0; n < 60; ++n) {
    RaggedProblem p{{}, {24, 8, 4}, 1 + static_cast<int>(random() % 3), {}};
    for (int type = 0; type < 25; ++type) {
      const RaggedTensor t = random_tensor(random, 400);
      p.tensors.insert(p.tensors.end(), 1 + random() % 40, t);
    }
    const RaggedPlan plan = plan_ragged(p);  // verifies itself
    EXPECT_GE(plan.shard1(), plan.bound1);
    EXPECT_GE(plan.shard3(), plan.bound3);
    EXPECT_LE(plan.shard3() * p.degrees.zero3, 2 * brute::total(p.tensors) + 4 * 400);
  }
}

TEST(Ragged, MoreSegmentsAreNeverWorse) {
  std::mt19937 random(6);
  for (int n = 0; n < 100; ++n) {
    RaggedProblem p{{}, {24, 24, 24}, 1, {}};
    if (n % 2 == 0) p.degrees = {24, 8, 4};
    for (int type = 3 + random() % 10; type > 0; --type) {
      const RaggedTensor t = random_tensor(random, 300);
      p.tensors.insert(p.tensors.end(), 1 + random() % 5, t);
    }
    const int64_t one = cost_of(p, plan_ragged(p));
    p.max_segments = 2;
    EXPECT_LE(cost_of(p, plan_ragged(p)), one);
    p.max_segments = 3;
    EXPECT_LE(cost_of(p, plan_ragged(p)), one);
  }
}

TEST(Ragged, SameInputSamePlan) {
  std::mt19937 random(5);
  RaggedProblem p{{}, {12, 6, 3}, 3, {}};
  for (int i = 0; i < 30; ++i) p.tensors.push_back(random_tensor(random, 50));
  const RaggedPlan a = plan_ragged(p), b = plan_ragged(p);
  EXPECT_EQ(a.segments, b.segments);
  EXPECT_EQ(a.steps, b.steps);
}

TEST(Ragged, OwningNothingIsNormal) {
  const RaggedPlan none = plan_ragged(flat(4, {}));
  EXPECT_EQ(none.shard3(), 0);
  const RaggedPlan empty = plan_ragged(flat(4, {{0, 1}, {0, 1}}, 3));
  EXPECT_EQ(empty.shard3(), 0);
  EXPECT_EQ(empty.segments[0].placements.size(), 2u);
  const RaggedPlan mixed = plan_ragged({{{0, 1}, {1, 1}}, {64, 8, 2}, 1, {}});
  EXPECT_EQ(mixed.shard1(), 1);
  EXPECT_EQ(mixed.shard3(), 4);  // zero3 -> zero2 divides evenly
}

TEST(Ragged, BadInputIsNamed) {
  EXPECT_THROW(plan_ragged(flat(0, {{1, 1}})), ConfigError);
  EXPECT_THROW(plan_ragged({{{1, 1}}, {6, 4, 2}, 1, {}}), ConfigError);
  EXPECT_THROW(plan_ragged(flat(2, {{-1, 1}})), ConfigError);
  EXPECT_THROW(plan_ragged(flat(2, {{3, 0}})), ConfigError);
  EXPECT_THROW(plan_ragged(flat(2, {{3, 4}})), ConfigError);
  EXPECT_THROW(plan_ragged(flat(2, {{3, 1}}, 4)), ConfigError);
  EXPECT_THROW(plan_ragged(flat(2, {{int64_t{1} << 60, 1}, {int64_t{1} << 60, 1}})), ConfigError);
}

TEST(RaggedVerify, RefusesEveryWayToBeWrong) {
  const RaggedProblem p{{{6, 3}, {4, 1}}, {4, 2, 2}, 1, {}};
  const RaggedSegment good{6, 6, 3, 0, {{0, 0}, {1, 6}}};
  EXPECT_NO_THROW(verify(p, std::vector{good}));
  const auto refused = [&](auto change) {
    RaggedSegment s = good;
    change(s);
    EXPECT_THROW(verify(p, std::vector{s}), PlanError);
  };
  refused([](RaggedSegment& s) { s.placements[1].offset = 5; });  // overlap
  refused([](RaggedSegment& s) { s.placements[1].offset = 9; });  // beyond the space
  refused([](RaggedSegment& s) { s.placements[1].offset = -1; });
  refused([](RaggedSegment& s) { s.placements.pop_back(); });     // missing
  refused([](RaggedSegment& s) { s.placements[1].tensor = 0; });  // twice
  refused([](RaggedSegment& s) {
    s.placements = {{1, 0}, {0, 4}};
  });                                               // the zero3 boundary cuts a block
  refused([](RaggedSegment& s) { s.shard1 = 4; });  // the zero1 boundary does
  refused([](RaggedSegment& s) { s.shard1 = 2; });  // too small for the zero2 shard
  refused([](RaggedSegment& s) { s.shard3 = 7; });  // levels do not nest
}

}  // namespace
}  // namespace dovetail::plan
