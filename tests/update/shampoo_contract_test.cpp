// What Shampoo's operations say of themselves: options, fields, state, cost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dovetail/base/error.h"
#include "dovetail/update/optimizer.h"
#include "dovetail/update/shampoo.h"

namespace dovetail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const ParameterRules kRules(RuleOptions{.weight_decay = 0.25});

std::vector<int64_t> sizes(const UpdateOp& op, const TensorSpec& spec, std::string_view name) {
  for (const StateField& f : op.state(spec))
    if (f.name == name) return f.unit_values;
  ADD_FAILURE() << "no state " << name;
  return {};
}

std::vector<std::string> names(const std::vector<StateField>& fields) {
  std::vector<std::string> result;
  for (const StateField& f : fields) result.push_back(f.name);
  return result;
}

TEST(ShampooContract, StateOfRaggedTiles) {
  const UpdateOps ops = make_shampoo({.block = 512}, kRules);
  ASSERT_EQ(ops.size(), 3u);
  const TensorSpec spec{.name = "w", .shape = {1500, 700}};
  const int64_t full = 512 * 513 / 2, low = 476 * 477 / 2, narrow = 188 * 189 / 2;
  for (const char* name : {"shampoo_left", "shampoo_left_root"})
    EXPECT_THAT(sizes(*ops[1], spec, name), ElementsAre(full, full, full, full, low, low)) << name;
  for (const char* name : {"shampoo_right", "shampoo_right_root"})
    EXPECT_THAT(sizes(*ops[1], spec, name), ElementsAre(full, narrow, full, narrow, full, narrow)) << name;
  EXPECT_THAT(sizes(*ops[1], spec, "shampoo_scale"), ElementsAre(4, 4, 4, 4, 4, 4));
  for (const StateField& f : ops[1]->state(spec)) EXPECT_EQ(f.per, StateField::Per::unit) << f.name;

  const TensorSpec experts{.name = "e", .shape = {2, 3, 5}, .kind = ParamKind::expert};
  EXPECT_THAT(sizes(*ops[1], experts, "shampoo_left"), ElementsAre(6, 6));
  EXPECT_THAT(sizes(*ops[1], experts, "shampoo_right"), ElementsAre(15, 15));
  const TensorSpec conv{.name = "c", .shape = {4, 600, 1}, .kind = ParamKind::conv};
  EXPECT_THAT(sizes(*ops[1], conv, "shampoo_left"), ElementsAre(10, 10));
  EXPECT_THAT(sizes(*ops[1], conv, "shampoo_right"), ElementsAre(full, 88 * 89 / 2));
}

TEST(ShampooContract, VectorsHaveOneSide) {
  const UpdateOps ops = make_shampoo({.block = 8, .grafting = Grafting::none}, kRules);
  ASSERT_EQ(ops.size(), 2u);
  const TensorSpec bias{.name = "b", .shape = {10}, .kind = ParamKind::vector};
  const TensorSpec scalar{.name = "s", .shape = {}, .kind = ParamKind::vector};
  const TensorSpec none{.name = "n", .shape = {0, 3}};
  EXPECT_THAT(names(ops[0]->state(bias)), ElementsAre("shampoo_right", "shampoo_right_root", "shampoo_scale"));
  EXPECT_THAT(sizes(*ops[0], bias, "shampoo_right"), ElementsAre(36, 3));
  EXPECT_THAT(sizes(*ops[0], scalar, "shampoo_right"), ElementsAre(1));
  EXPECT_THAT(sizes(*ops[0], none, "shampoo_right"), ElementsAre());
}

TEST(ShampooContract, OperationsFitTogether) {
  const std::vector<TensorSpec> tensors = {
      {.name = "w", .shape = {20, 30}},
      {.name = "b", .shape = {20}, .kind = ParamKind::vector},
      {.name = "e", .shape = {2, 9, 5}, .kind = ParamKind::expert},
      {.name = "0", .shape = {0, 5}},
  };
  const auto state_of = [&](const ShampooOptions& options) {
    return names(plan_updates(make_shampoo(options, kRules), tensors)[0].state);
  };
  EXPECT_THAT(state_of({.block = 16}),
              ElementsAre("graft_sq", "shampoo_left", "shampoo_left_root", "shampoo_right", "shampoo_right_root",
                          "shampoo_scale", "shampoo_momentum"));
  EXPECT_THAT(state_of({.beta1 = 0, .grafting = Grafting::sgd}),
              ElementsAre("shampoo_left", "shampoo_left_root", "shampoo_right", "shampoo_right_root",
                          "shampoo_scale"));
  const UpdateOps ops = make_shampoo({.block = 16}, kRules);
  EXPECT_EQ(ops[1]->unit(tensors[0]), Unit::of_tile(16, 16));
  EXPECT_EQ(ops[1]->uses(tensors[0]),
            (std::vector<FieldUse>{{"grad", Access::read_write}, {"graft_sq", Access::read}}));
}

TEST(ShampooContract, RulesChooseTheTensors) {
  const ParameterRules rules({.matrices = "shampoo", .others = "adamw"});
  for (const auto& op : make_shampoo({}, rules)) {
    EXPECT_TRUE(op->applies_to({.name = "w", .shape = {4, 4}})) << op->name();
    EXPECT_FALSE(op->applies_to({.name = "b", .shape = {4}, .kind = ParamKind::vector})) << op->name();
    EXPECT_FALSE(op->applies_to({.name = "e", .shape = {4, 4}, .kind = ParamKind::embedding})) << op->name();
  }
}

TEST(ShampooContract, DescriptionHasEveryHyperparameter) {
  const ShampooOptions all{.beta1 = 0.875, .beta2 = 0.75, .epsilon = 0.03125, .block = 77, .every = 13,
                           .grafting = Grafting::rmsprop};
  const std::string text = describe(make_shampoo(all, kRules));
  for (const char* part : {"beta1=0.875", "beta2=0.75", "epsilon=0.03125", "block=77", "every=13", "grafting=rmsprop",
                           "weight_decay=0.25", "shampoo_graft", "shampoo_precondition", "shampoo_apply"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(describe(make_shampoo({.grafting = Grafting::sgd}, kRules)), HasSubstr("grafting=sgd"));
}

std::string refusal(const ShampooOptions& options) {
  try {
    make_shampoo(options, kRules);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(ShampooContract, RefusesOptionsOutOfRange) {
  EXPECT_EQ(refusal({.beta1 = 1}), "shampoo: beta1 must be at least 0 and below 1, got 1");
  EXPECT_EQ(refusal({.beta1 = -0.5}), "shampoo: beta1 must be at least 0 and below 1, got -0.5");
  EXPECT_EQ(refusal({.beta2 = 1.5}), "shampoo: beta2 must be at least 0 and at most 1, got 1.5");
  EXPECT_EQ(refusal({.beta2 = NAN}), "shampoo: beta2 must be at least 0 and at most 1, got nan");
  EXPECT_EQ(refusal({.epsilon = 0}), "shampoo: epsilon must be above 0 and below 1, got 0");
  EXPECT_EQ(refusal({.epsilon = 1}), "shampoo: epsilon must be above 0 and below 1, got 1");
  EXPECT_EQ(refusal({.block = 0}), "shampoo: block must be 1 to 32768, got 0");
  EXPECT_EQ(refusal({.block = 32769}), "shampoo: block must be 1 to 32768, got 32769");
  EXPECT_EQ(refusal({.every = 0}), "shampoo: every must be at least 1, got 0");
  EXPECT_EQ(refusal({.beta1 = 0, .beta2 = 1}), "accepted");
  for (const Grafting g : {Grafting::none, Grafting::sgd, Grafting::rmsprop})
    EXPECT_EQ(parse_grafting(name_of(g)), g);
  try {
    parse_grafting("adam");
    ADD_FAILURE();
  } catch (const ConfigError& e) {
    EXPECT_STREQ(e.what(), "shampoo: grafting must be none, sgd or rmsprop, got \"adam\"");
  }
}

TEST(ShampooContract, CostAndWorkspaceFollowTheTile) {
  const UpdateOps ops = make_shampoo({.every = 10, .grafting = Grafting::none}, kRules);
  const TensorSpec spec{.name = "w", .shape = {1024, 1024}}, bias{.name = "b", .shape = {1024}};
  const auto cost = [&](int64_t rows, int64_t columns) {
    return ops[0]->cost(spec, {.first = 0, .rows = rows, .columns = columns, .stride = 1024});
  };
  const double n = 1024, cubes = cost(1024, 1024) / (n * n * n);
  // Two sides: 9/8 of a half product, a whole one, and a tenth of 2 (9 + 9/8); 16 n^2 for the rest.
  EXPECT_NEAR(cubes, 2 * (9.0 / 8 + 2 + 2 * (9 + 9.0 / 8) / 10) + 16 / n, 1e-9);
  EXPECT_NEAR(cost(1024, 512), cost(512, 1024), 1e-3);
  EXPECT_LT(ops[0]->cost(bias, {.first = 0, .rows = 1, .columns = 1024, .stride = 1024}), cost(1024, 1024));
  const auto rarely = make_shampoo({.every = 1000, .grafting = Grafting::none}, kRules);
  EXPECT_LT(rarely[0]->cost(spec, {.first = 0, .rows = 1024, .columns = 1024, .stride = 1024}), cost(1024, 1024));
}

}  // namespace
}  // namespace dovetail
