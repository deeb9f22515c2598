#include "dovetail/update/sgd.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dovetail/base/error.h"
#include "tests/update/reference.h"

namespace dovetail {
namespace {

ParameterRules rules_with(double weight_decay) {
  return ParameterRules({.weight_decay = weight_decay});
}

struct Case {
  double momentum, dampening;
  bool nesterov;
  double weight_decay;
};

class SgdAgainstTorch : public testing::TestWithParam<Case> {};

TEST_P(SgdAgainstTorch, TwentyStepsAgree) {
  const Case c = GetParam();
  const float lr = 0.03125f, scale = 0.75f;
  const TensorSpec spec{.name = "w", .shape = {37, 29}};
  Parameter ours(spec, 1);
  torch::Tensor reference = to_torch(ours.weight).to(torch::kFloat64).requires_grad_(true);
  torch::optim::SGD optimizer({reference}, torch::optim::SGDOptions(lr)
                                               .momentum(c.momentum)
                                               .dampening(c.dampening)
                                               .nesterov(c.nesterov)
                                               .weight_decay(c.weight_decay));
  const Sgd op({c.momentum, c.dampening, c.nesterov, Decay::l2}, rules_with(c.weight_decay));
  for (int64_t step = 1; step <= 20; ++step) {
    ours.grad = random_values(spec.numel(), 100 + static_cast<uint64_t>(step), 1);
    reference.mutable_grad() = to_torch(ours.grad).to(torch::kFloat64) * scale;
    ours.run(op, {.step = step, .lr = lr, .grad_scale = scale});
    optimizer.step();
    ASSERT_LT(relative_difference(ours.weight, reference), 1e-6) << step;
  }
  EXPECT_EQ(ours.state.count("momentum_buffer"), c.momentum == 0 ? 0u : 1u);
}

INSTANTIATE_TEST_SUITE_P(All, SgdAgainstTorch,
                         testing::Values(Case{0, 0, false, 0}, Case{0, 0, false, 0.1},
                                         Case{0.9, 0, false, 0}, Case{0.9, 0.5, false, 0.1},
                                         Case{0.9, 0, true, 0.1}, Case{0.5, 1, false, 0}));

TEST(Sgd, DecoupledDecayByHand) {
  Parameter p({.name = "w", .shape = {1}, .kind = ParamKind::matrix}, 1);
  const Sgd op({.momentum = 0.5, .decay = Decay::decoupled}, rules_with(0.1));
  p.weight = {2};
  p.grad = {1};
  p.run(op, {.step = 1, .lr = 0.5f});
  EXPECT_FLOAT_EQ(p.weight[0], 2 - 0.5f * 1 - 0.5f * 0.1f * 2);  // 1.4
  EXPECT_FLOAT_EQ(p.state.at("momentum_buffer")[0], 1);          // no decay in it
  p.run(op, {.step = 2, .lr = 0.5f});
  EXPECT_FLOAT_EQ(p.weight[0], 1.4f - 0.5f * 1.5f - 0.5f * 0.1f * 1.4f);
}

TEST(Sgd, AnySplitGivesTheSameBits) {
  expect_same_bits_for_any_split(Sgd({}, rules_with(0.1)));
  expect_same_bits_for_any_split(Sgd({.momentum = 0.9, .dampening = 0.1}, rules_with(0.1)));
  expect_same_bits_for_any_split(
      Sgd({.momentum = 0.9, .nesterov = true, .decay = Decay::decoupled}, rules_with(0.1)));
}

TEST(Sgd, StateAndFieldsFollowTheMomentum) {
  const TensorSpec spec{.name = "w", .shape = {4, 4}};
  const Sgd plain({}, rules_with(0)), heavy({.momentum = 0.9}, rules_with(0));
  EXPECT_TRUE(plain.state(spec).empty());
  EXPECT_EQ(plain.uses(spec),
            (std::vector<FieldUse>{{"weight", Access::read_write}, {"grad", Access::read}}));
  EXPECT_EQ(heavy.state(spec), (std::vector<StateField>{{"momentum_buffer", DType::f32, 0}}));
  EXPECT_EQ(heavy.uses(spec).size(), 3u);
}

TEST(Sgd, RefusesOptionsThatCannotWork) {
  EXPECT_THROW(Sgd({.momentum = 1}, rules_with(0)), ConfigError);
  EXPECT_THROW(Sgd({.momentum = -0.1}, rules_with(0)), ConfigError);
  EXPECT_THROW(Sgd({.momentum = 0.9, .dampening = 1.5}, rules_with(0)), ConfigError);
  EXPECT_THROW(Sgd({.dampening = 0.5}, rules_with(0)), ConfigError);
  EXPECT_THROW(Sgd({.nesterov = true}, rules_with(0)), ConfigError);
  EXPECT_THROW(Sgd({.momentum = 0.9, .dampening = 0.1, .nesterov = true}, rules_with(0)),
               ConfigError);
}

}  // namespace
}  // namespace dovetail
