#include "dovetail/update/adamw.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "dovetail/base/error.h"
#include "tests/update/reference.h"

namespace dovetail {
namespace {

ParameterRules rules_with(double weight_decay) {
  return ParameterRules({.weight_decay = weight_decay});
}

struct Case {
  double lr, beta1, beta2, eps, weight_decay;
  float grad_scale;
};

class AdamWAgainstTorch : public testing::TestWithParam<Case> {};

TEST_P(AdamWAgainstTorch, TwentyStepsAgree) {
  const Case c = GetParam();
  const TensorSpec spec{.name = "w", .shape = {37, 29}};
  Parameter ours(spec, 1);
  torch::Tensor reference = to_torch(ours.weight).to(torch::kFloat64).requires_grad_(true);
  torch::Tensor single = to_torch(ours.weight).requires_grad_(true);
  const auto options = torch::optim::AdamWOptions(c.lr)
                           .betas({c.beta1, c.beta2})
                           .eps(c.eps)
                           .weight_decay(c.weight_decay);
  torch::optim::AdamW in_double({reference}, options), in_float({single}, options);

  const AdamW op({c.beta1, c.beta2, c.eps}, rules_with(c.weight_decay));
  for (int64_t step = 1; step <= 20; ++step) {
    ours.grad =
        random_values(spec.numel(), 100 + step, std::pow(10.0f, static_cast<float>(step % 5) - 3));
    reference.mutable_grad() = to_torch(ours.grad).to(torch::kFloat64) * c.grad_scale;
    single.mutable_grad() = to_torch(ours.grad) * c.grad_scale;
    ours.run(op, {.step = step, .lr = static_cast<float>(c.lr), .grad_scale = c.grad_scale});
    in_double.step();
    in_float.step();
    ASSERT_LT(relative_difference(ours.weight, reference), 1e-6) << step;
    ASSERT_LT(relative_difference(ours.weight, single), 1e-6) << step;
  }
  // The moments too, elementwise, against double.
  auto& state = static_cast<torch::optim::AdamWParamState&>(
      *in_double.state().at(reference.unsafeGetTensorImpl()));
  EXPECT_LT(relative_difference(ours.state.at("exp_avg"), state.exp_avg()), 1e-6);
  EXPECT_LT(relative_difference(ours.state.at("exp_avg_sq"), state.exp_avg_sq()), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(All, AdamWAgainstTorch,
                         testing::Values(Case{1e-3, 0.9, 0.999, 1e-8, 0, 1},
                                         Case{3e-2, 0.9, 0.95, 1e-8, 0.1, 0.125f},
                                         Case{1e-2, 0.0, 0.99, 1e-6, 0.5, 3},
                                         Case{1e-3, 0.8, 0.0, 1e-3, 0.01, 1},
                                         Case{0, 0.9, 0.999, 1e-8, 0.1, 1}));

TEST(AdamW, FirstStepByHand) {
  Parameter p({.name = "w", .shape = {2}, .kind = ParamKind::matrix}, 1);
  p.weight = {1, -2};
  p.grad = {4, -1};
  const AdamW op({0.9, 0.999, 1e-8}, rules_with(0.1));
  p.run(op, {.step = 1, .lr = 0.01f, .grad_scale = 0.5f});
  // Bias correction makes the first step lr * sign(g), and decay takes lr * 0.1 of the weight.
  EXPECT_FLOAT_EQ(p.weight[0], 1 - 0.01f - 0.001f);
  EXPECT_FLOAT_EQ(p.weight[1], -2 + 0.01f + 0.002f);
  EXPECT_FLOAT_EQ(p.state.at("exp_avg")[0], 0.2f);
  EXPECT_FLOAT_EQ(p.state.at("exp_avg_sq")[0], 0.004f);
}

TEST(AdamW, RulesReachTheCoefficients) {
  const AdamW op(
      {}, ParameterRules({.weight_decay = 0.5, .rules = {{.pattern = "frozen*", .lr_scale = 0}}}));
  Parameter still({.name = "frozen.w", .shape = {9}, .kind = ParamKind::matrix}, 2);
  const auto before = still.weight;
  still.run(op, {.step = 1, .lr = 0.1f});
  EXPECT_EQ(still.weight, before);

  Parameter bias({.name = "bias", .shape = {9}, .kind = ParamKind::vector}, 3), matrix = bias;
  matrix.spec.kind = ParamKind::matrix;
  bias.grad.assign(9, 0);
  matrix.grad = bias.grad;
  const auto start = bias.weight;
  bias.run(op, {.step = 1, .lr = 0.1f});
  matrix.run(op, {.step = 1, .lr = 0.1f});
  for (size_t i = 0; i < 9; ++i) {
    EXPECT_EQ(bias.weight[i], start[i]);
    EXPECT_FLOAT_EQ(matrix.weight[i], start[i] * 0.95f);
  }
}

TEST(AdamW, AnySplitGivesTheSameBits) {
  const AdamW op({0.9, 0.95, 1e-8}, rules_with(0.1));
  expect_same_bits_for_any_split(op);
}

TEST(AdamW, RefusesWhatIsNoOptimizer) {
  expect_bad_adam_options_are_refused(
      [](double b1, double b2, double eps) { AdamW({b1, b2, eps}, rules_with(0)); });
}

TEST(AdamW, SpansAndStepAreChecked) {
  std::vector<float> three(3), two(2);
  const auto c = adamw_coefficients({}, {}, {.step = 1, .lr = 1});
  EXPECT_THROW(adamw_update(c, three, two, three, three), InvariantError);
  EXPECT_THROW(adamw_update(c, three, three, three, two), InvariantError);
  EXPECT_THROW(adamw_coefficients({}, {}, {.step = 0}), InvariantError);
}

}  // namespace
}  // namespace dovetail
