#include "dovetail/update/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

const std::vector<TensorSpec> kTensors = {
    {.name = "w", .shape = {4, 4}, .kind = ParamKind::matrix},
    {.name = "b", .shape = {4}, .kind = ParamKind::vector},
};

// An operation that is what the test says it is.
struct Fake final : UpdateOp {
  std::string label = "fake";
  std::string only;  // applies to this tensor alone; to all when empty
  std::vector<FieldUse> used;
  std::vector<StateField> kept;

  std::string_view name() const override { return label; }
  bool applies_to(const TensorSpec& t) const override { return only.empty() || t.name == only; }
  Unit unit(const TensorSpec&) const override { return {}; }
  std::vector<FieldUse> uses(const TensorSpec&) const override { return used; }
  std::vector<StateField> state(const TensorSpec&) const override { return kept; }
  double cost(const TensorSpec&, const UnitPlace&) const override { return 0; }
  void run(const UnitView&, const StepContext&) const override {}
  std::string describe() const override { return label; }
};

std::shared_ptr<const UpdateOp> fake(std::string only, std::vector<FieldUse> used,
                                     std::vector<StateField> kept, std::string label = "fake") {
  auto op = std::make_shared<Fake>();
  op->only = std::move(only);
  op->used = std::move(used);
  op->kept = std::move(kept);
  op->label = std::move(label);
  return op;
}

std::string error_of(const UpdateOps& ops, const std::vector<TensorSpec>& tensors = kTensors) {
  try {
    plan_updates(ops, tensors);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

TEST(Optimizer, BuildsWhatItsNameSays) {
  OptimizerOptions options;
  options.adamw.beta2 = 0.95;
  const UpdateOps adamw = make_optimizer(options, kTensors);
  ASSERT_EQ(adamw.size(), 1u);
  EXPECT_EQ(adamw[0]->name(), "adamw");
  EXPECT_THAT(describe(adamw), testing::HasSubstr("beta2=0.95"));
  const auto plan = plan_updates(adamw, kTensors);
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan[1].ops, std::vector<size_t>{0});
  EXPECT_EQ(plan[1].state,
            (std::vector<StateField>{{"exp_avg", DType::f32, 0}, {"exp_avg_sq", DType::f32, 0}}));

  options.name = "sgd";
  const UpdateOps sgd = make_optimizer(options, kTensors);
  EXPECT_EQ(sgd[0]->name(), "sgd");
  EXPECT_TRUE(plan_updates(sgd, kTensors)[0].state.empty());
  EXPECT_NE(describe(sgd), describe(adamw));
}

TEST(Optimizer, RefusesUnknownNamesAndUnusedRules) {
  OptimizerOptions options{.name = "adam"};
  EXPECT_THROW(make_optimizer(options, kTensors), ConfigError);
  options = {.rules = {.rules = {{"x*", 1, {}}}}};
  EXPECT_THROW(make_optimizer(options, kTensors), ConfigError);
}

TEST(Optimizer, MuonUnitsMustExist) {
  OptimizerOptions options{.name = "muon"};
  options.muon.unit = "head";
  const auto refusal = [&](const std::vector<TensorSpec>& tensors) -> std::string {
    try {
      make_optimizer(options, tensors);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(refusal(kTensors), testing::HasSubstr("muon.unit: wanted matrix or nodes"));
  std::vector<TensorSpec> with_heads = kTensors;
  with_heads[0].heads = 2;
  EXPECT_EQ(refusal(with_heads), "");
  // Not where the one tensor that has heads belongs to another optimizer.
  options.rules.rules = {{.pattern = "w", .optimizer = "sgd"}};
  EXPECT_THAT(refusal(with_heads), testing::HasSubstr("\"head\""));
}

TEST(Optimizer, RulesChooseTheOptimizer) {
  OptimizerOptions options{.name = "muon"};
  const ParameterRules rules = optimizer_rules(options);
  EXPECT_TRUE(rules.selects("muon", kTensors[0]));
  EXPECT_FALSE(rules.selects("adamw", kTensors[0]));
  EXPECT_TRUE(rules.selects("adamw", kTensors[1]));
  options.rules.rules = {{.pattern = "b", .optimizer = "adam8"}};
  EXPECT_TRUE(optimizer_rules(options).selects("adam8", kTensors[1]));
  options.rules.rules = {{.pattern = "b", .optimizer = "adam"}};
  EXPECT_THROW(make_optimizer(options, kTensors), ConfigError);
}

TEST(Optimizer, EveryParameterNeedsAnOperation) {
  EXPECT_THAT(error_of({fake("w", {}, {})}), testing::HasSubstr("\"b\""));
  EXPECT_THAT(error_of({}), testing::HasSubstr("\"w\""));
  EXPECT_EQ(error_of({fake("w", {}, {}), fake("b", {}, {})}), "");
}

TEST(Optimizer, OperationsShareEqualFieldsAndRefuseUnequalOnes) {
  const StateField momentum{"momentum", DType::f32, 0};
  const auto keeps = fake("", {{"momentum", Access::read_write}}, {momentum}, "first");
  const auto plan =
      plan_updates({keeps, fake("w", {{"momentum", Access::read}}, {momentum})}, kTensors);
  EXPECT_EQ(plan[0].ops, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(plan[0].state, std::vector<StateField>{momentum});
  EXPECT_EQ(plan[1].ops, std::vector<size_t>{0});

  EXPECT_THAT(error_of({keeps, fake("b", {}, {{"momentum", DType::bf16, 0}}, "second")}),
              testing::AllOf(testing::HasSubstr("second"), testing::HasSubstr("\"momentum\" of b"),
                             testing::HasSubstr("bf16"), testing::HasSubstr("fp32")));
  EXPECT_NE(error_of({keeps, fake("b", {}, {{"momentum", DType::f32, 1}})}), "");
  // Different schemas on different tensors do not meet.
  EXPECT_EQ(error_of({fake("w", {}, {momentum}), fake("b", {}, {{"momentum", DType::bf16, 0}})}),
            "");
}

TEST(Optimizer, RefusesBadDeclarations) {
  EXPECT_THAT(error_of({fake("", {}, {{"grad", DType::f32, 0}})}),
              testing::HasSubstr("every parameter has"));
  EXPECT_THAT(error_of({fake("", {}, {{"a", DType::f32, 0}, {"a", DType::f32, 0}})}),
              testing::HasSubstr("twice"));
  EXPECT_THAT(error_of({fake("", {{"a", Access::read}}, {})}),
              testing::HasSubstr("no operation keeps"));
  EXPECT_THAT(error_of({fake("", {}, {})}, {kTensors[0], kTensors[0]}),
              testing::HasSubstr("two parameters"));
}

TEST(UnitView, FieldsAreFoundByNameAndChecked) {
  float value = 3;
  const TensorSpec spec{.name = "w", .shape = {1}};
  const std::vector<Field> fields = {{"weight", DType::f32, reinterpret_cast<std::byte*>(&value), 1},
                                     {"bits", DType::bf16, reinterpret_cast<std::byte*>(&value), 1}};
  const UnitView view{&spec, 0, {0, 1, 1, 1}, -1, 1, fields, {}};
  EXPECT_EQ(view.f32("weight")[0], 3);
  EXPECT_EQ(view.f32("weight").size(), 1u);
  EXPECT_THROW(view.field("grad"), InvariantError);
  EXPECT_THROW(view.f32("bits"), InvariantError);
}

}  // namespace
}  // namespace dovetail
