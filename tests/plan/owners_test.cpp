#include "dovetail/plan/owners.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "dovetail/base/error.h"
#include "dovetail/plan/staging.h"
#include "tests/plan/random_plan.h"

namespace dovetail::plan {
namespace {

UnitDemand demand_of(const Plan& plan, int64_t tensor, const Unit& unit, double flops_per_element,
                     int64_t op = 0) {
  UnitDemand d{.tensor = tensor,
               .op = op,
               .places = unit_places(plan.tensors[tensor], unit),
               .cost = {},
               .state = {},
               .workspace = {},
               .fields = {{"grad", 4, 2, true, true}, {"extra", 4, 4, true, false}}};
  for (const UnitPlace& p : d.places) {
    d.cost.push_back(flops_per_element * static_cast<double>(p.numel()));
    d.state.push_back(8);
    d.workspace.push_back(p.numel());
  }
  return d;
}

// The rank of one replica that holds an element of a tensor, found by looking at every shard.
int64_t holder_of(const Plan& plan, int64_t tensor, int64_t element, int64_t replica) {
  for (const GroupPlan& g : plan.groups)
    for (const BucketPlan& b : g.buckets)
      for (const SegmentLayout& s : b.segments)
        for (const Placement& p : s.placements)
          for (int64_t rank = 0; p.tensor == tensor && rank < plan.options.world; ++rank) {
            const GridPosition at = position_of(plan.options.degrees, rank);
            if (at.replica == replica && s.zero1_interval(zero1_shard(plan.options.degrees, at))
                                             .contains(p.offset + element))
              return rank;
          }
  return -1;
}

TEST(Owners, TheWorkedExampleOfTheDesign) {
  PlanOptions o;
  o.world = 4;
  o.degrees = {4, 2, 2};
  o.alignment = 8;
  const Plan plan =
      make_plan(o, {{"", {{"wo", {24}}, {.name = "wq", .shape = {8, 4}, .heads = 2}, {"b", {8}}}}});
  const std::vector<UnitDemand> demands{demand_of(plan, 1, Unit::of_node("head"), 1000)};
  const OwnerPlan owners = assign_owners(plan, demands);
  ASSERT_EQ(owners.units.size(), 2u);
  // Zero1 shards 0, 1, 2, 3 lie on ranks 0, 2, 1, 3.
  EXPECT_EQ(owners.units[0].fragments, (std::vector<UnitFragment>{{1, {0, 8}}, {2, {8, 16}}}));
  EXPECT_EQ(rank_of(o.degrees, owners.units[0].owner, 0), 2);
  EXPECT_EQ(owners.units[1].fragments, (std::vector<UnitFragment>{{2, {0, 8}}, {3, {8, 16}}}));
  EXPECT_EQ(rank_of(o.degrees, owners.units[1].owner, 0), 1);
  using Bytes = std::map<std::string, int64_t>;
  EXPECT_EQ(fragment_bytes(plan, demands, owners, 0), Bytes{});
  EXPECT_EQ(fragment_bytes(plan, demands, owners, 2), (Bytes{{"grad", 16}}));
  EXPECT_EQ(fragment_bytes(plan, demands, owners, 1), (Bytes{{"grad", 32}, {"extra", 32}}));
  EXPECT_EQ(fragment_bytes(plan, demands, owners, 3), (Bytes{{"grad", 16}, {"extra", 32}}));
}

TEST(Owners, RandomPlansAgainstAWalkOverElements) {
  RandomPlans random(77);
  for (int round = 0; round < 60; ++round) {
    const Plan plan = make_plan(random.options(), random.groups());
    std::vector<UnitDemand> demands;
    for (int64_t t = 0; t < std::ssize(plan.tensors); ++t)
      if (random.flip())
        demands.push_back(demand_of(plan, t,
                                    random.flip() ? Unit::of_matrix() : Unit::of_tile(3, 5),
                                    random.one_of<double>({0, 1, 1000})));
    const OwnerPlan owners = assign_owners(plan, demands);
    EXPECT_EQ(owners, assign_owners(plan, demands));
    const int64_t replicas = plan.options.world / plan.options.degrees.zero1;
    std::vector<std::map<std::string, int64_t>> sent(plan.options.world);
    int64_t elements = 0, wanted = 0;
    for (const UnitDemand& d : demands)
      for (const UnitPlace& p : d.places) wanted += p.numel();
    for (const OwnedUnit& u : owners.units) {
      const UnitDemand& d = demands[u.demand];
      const UnitPlace& p = d.places[u.number];
      elements += p.numel();
      for (int64_t i = 0; i < p.numel(); ++i) {
        const int64_t element = p.first + i / p.columns * p.stride + i % p.columns;
        for (int64_t r = 0; r < replicas; ++r) {
          const bool everywhere = u.replica == kEveryReplica;
          const int64_t owner = rank_of(plan.options.degrees, u.owner, everywhere ? r : u.replica);
          const int64_t holder = holder_of(plan, d.tensor, element, r);
          const auto f =
              std::find_if(u.fragments.begin(), u.fragments.end(),
                           [&](const UnitFragment& f) { return f.packed.contains({i, i + 1}); });
          ASSERT_NE(f, u.fragments.end());
          ASSERT_EQ(rank_of(plan.options.degrees, f->shard, r), holder);
          if (holder == owner) continue;
          for (const UnitField& field : d.fields) {
            if (field.reads && (everywhere || r == u.replica))
              sent[holder][field.name] += field.wire;
            if (field.writes) sent[owner][field.name] += field.wire;
          }
        }
      }
    }
    ASSERT_EQ(elements, wanted);
    for (int64_t rank = 0; rank < plan.options.world; ++rank)
      ASSERT_EQ(fragment_bytes(plan, demands, owners, rank), sent[rank]) << to_text(plan);
  }
}

Plan blocks(int64_t world, Degrees degrees, int64_t count) {
  PlanOptions o;
  o.world = world;
  o.degrees = degrees;
  std::vector<GroupSpec> groups;
  for (int64_t b = 0; b < count; ++b) {
    const std::string name = "block" + std::to_string(b);
    groups.push_back({name,
                      {{name + ".q", {512, 512}},
                       {name + ".k", {512, 512}},
                       {name + ".v", {512, 512}},
                       {name + ".o", {512, 512}},
                       {name + ".up", {1408, 512}},
                       {name + ".gate", {1408, 512}},
                       {name + ".down", {512, 1408}}}});
  }
  return make_plan(o, groups);
}

std::vector<UnitDemand> all_matrices(const Plan& plan, double flops_per_element) {
  std::vector<UnitDemand> demands;
  for (int64_t t = 0; t < std::ssize(plan.tensors); ++t)
    demands.push_back(demand_of(plan, t, Unit::of_matrix(), flops_per_element));
  return demands;
}

TEST(Owners, DearWorkIsEvenAndCheapWorkStaysWhereItLies) {
  for (int64_t world : {2, 4, 8}) {
    const Plan plan = blocks(world, {world, world, world}, 8);
    const std::vector<UnitDemand> dear = all_matrices(plan, 20000),
                                  cheap = all_matrices(plan, 0.001);
    EXPECT_LT(assign_owners(plan, dear).imbalance(), world == 8 ? 1.1 : 1.02) << world;
    for (const OwnedUnit& u : assign_owners(plan, cheap).units) {
      int64_t most = 0, owned = 0;
      for (const UnitFragment& f : u.fragments) {
        most = std::max(most, f.packed.size());
        if (f.shard == u.owner) owned = f.packed.size();
      }
      EXPECT_EQ(owned, most);
    }
  }
}

TEST(Owners, ReplicasShareWhatCostsMoreThanItsResult) {
  const Plan plan = blocks(4, {1, 1, 1}, 4);
  const std::vector<UnitDemand> dear = all_matrices(plan, 20000), cheap = all_matrices(plan, 2);
  const OwnerPlan shared = assign_owners(plan, dear), repeated = assign_owners(plan, cheap);
  double all = 0;
  for (const UnitDemand& d : dear) all = std::accumulate(d.cost.begin(), d.cost.end(), all);
  EXPECT_LT(shared.imbalance(), 1.03);
  EXPECT_DOUBLE_EQ(std::accumulate(shared.load.begin(), shared.load.end(), 0.0), all);
  for (const OwnedUnit& u : repeated.units) EXPECT_EQ(u.replica, kEveryReplica);
  for (int64_t r = 0; r < 4; ++r) EXPECT_TRUE(fragment_bytes(plan, cheap, repeated, r).empty());
}

TEST(Owners, BatchesAreOneOperationOfOneGroup) {
  const Plan plan = blocks(2, {2, 2, 2}, 3);
  std::vector<UnitDemand> demands = all_matrices(plan, 100);
  demands.push_back(demand_of(plan, 3, Unit::of_tile(64, 64), 1, 1));
  const OwnerPlan owners = assign_owners(plan, demands);
  const std::vector<UnitBatch> batches = unit_batches(plan, demands, owners);
  ASSERT_EQ(batches.size(), 4u);
  EXPECT_EQ(batches[0].end, 7);
  EXPECT_EQ(batches[1].op, 1);
  EXPECT_EQ(batches[1].end - batches[1].begin, 64);
  EXPECT_EQ(batches[2].group, 1);
  EXPECT_EQ(batches.back().end, std::ssize(owners.units));
}

TEST(Owners, StagingIsForWhatIsNotWholeAndTravelsAsItIsKept) {
  PlanOptions o;
  o.world = 2;
  o.degrees = {2, 2, 2};
  o.alignment = 1;
  const Plan plan = make_plan(o, {{"", {{"a", {5, 4}}, {"b", {4, 5}}}}});  // cut at 20: both whole
  const std::vector<UnitDemand> whole{demand_of(plan, 0, Unit::of_matrix(), 100),
                                      demand_of(plan, 1, Unit::of_matrix(), 100)};
  HeldBytes held;
  add_unit_bytes(plan, whole, assign_owners(plan, whole), 1, held);
  EXPECT_EQ(held.staging, 0);
  EXPECT_EQ(held.workspace, 20);
  EXPECT_EQ(held.unit_state, 8);
  const Plan cut = make_plan(o, {{"", {{"a", {10, 4}}}}});  // rows 0-4 and 5-9
  const std::vector<UnitDemand> demands{demand_of(cut, 0, Unit::of_matrix(), 100)};
  const OwnerPlan owners = assign_owners(cut, demands);
  HeldBytes owner, holder;
  add_unit_bytes(cut, demands, owners, 0, owner);
  add_unit_bytes(cut, demands, owners, 1, holder);
  // Owner: both fields whole, and all of "grad" as bf16. Holder: its half of "grad" as bf16;
  // "extra" leaves from its place.
  EXPECT_EQ(owner.staging, 192 + 192 + 128);
  EXPECT_EQ(holder.staging, 64);
  EXPECT_EQ(holder.unit_state + holder.workspace, 0);
}

TEST(Owners, BadDemandsAreNamed) {
  const Plan plan = blocks(2, {2, 2, 2}, 1);
  std::vector<UnitDemand> demands{demand_of(plan, 0, Unit::of_matrix(), 1)};
  demands[0].cost[0] = -1;
  EXPECT_THROW(assign_owners(plan, demands), ConfigError);
  demands[0].cost[0] = 1;
  demands[0].places[0].first = 1;
  EXPECT_THROW(assign_owners(plan, demands), ConfigError);
}

}  // namespace
}  // namespace dovetail::plan
