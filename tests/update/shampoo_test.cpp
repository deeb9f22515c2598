#include "dovetail/update/shampoo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "dovetail/update/matrix_root.h"
#include "dovetail/update/sgd.h"
#include "tests/update/shampoo_support.h"

namespace dovetail {
namespace {

using testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

ParameterRules rules_with(double weight_decay) {
  return ParameterRules({.weight_decay = weight_decay});
}

TensorSpec matrix_spec(int64_t rows, int64_t columns) { return {.name = "w", .shape = {rows, columns}}; }

Values times(Values values, float factor) {
  for (float& v : values) v *= factor;
  return values;
}

Values outer(const Values& a, const Values& b) {
  Values values;
  for (const float x : a)
    for (const float y : b) values.push_back(x * y);
  return values;
}

bool all_finite(const Values& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

bool all_finite(const Held& held) {
  for (const auto& [name, values] : held.fields)
    if (!all_finite(values)) return false;
  for (const auto& [name, units] : held.units)
    for (const Values& values : units)
      if (!all_finite(values)) return false;
  return true;
}

double norm(const Values& values) { return in_double(values, {std::ssize(values)}).norm().item<double>(); }

// Scale-free agreement with a multiple of `wanted`: 0 when they are parallel.
double angle(const Values& got, const Values& wanted) {
  const at::Tensor a = in_double(got, {-1}), b = in_double(wanted, {-1});
  return (a / a.norm() - b / b.norm()).norm().item<double>();
}

struct Case {
  std::vector<int64_t> shape;
  ShampooOptions options;
  double bound;  // of the relative error of directions and weights
};

class ShampooAgainstDense : public testing::TestWithParam<Case> {};

// Errors are those of fp32 statistics, near 1e-7 of their largest eigenvalue, over the smallest one
// with epsilon. Averages over several square gradients are sound; those over fewer are damped here
// by 1e-3, and a single square one (beta2 = 0) has a condition of some 1e5.
TEST_P(ShampooAgainstDense, TwelveStepsAgree) {
  const Case& c = GetParam();
  const TensorSpec spec{.name = "w", .shape = c.shape};
  const int64_t n = spec.numel(), rows = c.shape.size() < 2 ? 1 : c.shape[0];
  Held ours(spec, make_shampoo(c.options, rules_with(0.1)), 1);
  DenseShampoo dense{.options = c.options, .vector = c.shape.size() < 2};
  at::Tensor weight = ours.tensor("weight").reshape({rows, -1});
  const float scale = 0.37f, lr = 0.05f;
  double worst = 0;
  for (int64_t step = 1; step <= 12; ++step) {
    const Values grad = normal_values(n, 100 + static_cast<uint64_t>(step), 0.3f);
    ours.step({.step = step, .lr = lr, .grad_scale = scale}, grad);
    const at::Tensor d = dense.step(weight, in_double(grad, {rows, -1}) * scale, step, lr, 0.1);
    const double error = difference(ours.tensor("grad").reshape({rows, -1}), d);
    worst = std::max(worst, error);
    ASSERT_LT(error, c.bound) << step;
    ASSERT_LT(difference(ours.tensor("weight").reshape({rows, -1}), weight), c.bound) << step;
  }
  RecordProperty("worst", fmt::format("{:.2g}", worst));
  ASSERT_EQ(ours.fields.count("graft_sq"), c.options.grafting == Grafting::rmsprop ? 1u : 0u);
  EXPECT_GT(worst, 0);  // fp32 is not fp64: the two are different computations
}

INSTANTIATE_TEST_SUITE_P(
    All, ShampooAgainstDense,
    testing::Values(
        Case{{24, 24}, {.every = 1, .grafting = Grafting::none}, 1e-5},
        Case{{24, 24}, {.every = 1, .grafting = Grafting::sgd}, 1e-5},
        Case{{24, 24}, {.every = 1, .grafting = Grafting::rmsprop}, 1e-5},
        Case{{24, 24}, {.beta1 = 0, .every = 5, .grafting = Grafting::none}, 1e-5},
        Case{{24, 24}, {.beta2 = 1, .every = 3, .grafting = Grafting::none}, 1e-5},
        Case{{24, 24}, {.beta2 = 1, .every = 3, .grafting = Grafting::rmsprop}, 1e-5},
        Case{{24, 24}, {.beta2 = 0, .every = 1, .grafting = Grafting::rmsprop}, 5e-3},
        Case{{40, 17}, {.epsilon = 1e-3, .every = 4, .grafting = Grafting::sgd}, 1e-4},
        Case{{17, 40}, {.epsilon = 1e-3, .every = 4, .grafting = Grafting::none}, 1e-4},
        Case{{150, 90}, {.epsilon = 1e-3, .every = 5, .grafting = Grafting::rmsprop}, 1e-4},
        Case{{1, 30}, {.epsilon = 1e-3, .every = 2, .grafting = Grafting::none}, 1e-4},
        Case{{30, 1}, {.epsilon = 1e-3, .every = 2, .grafting = Grafting::rmsprop}, 1e-4},
        Case{{30}, {.epsilon = 1e-3, .every = 2, .grafting = Grafting::none}, 1e-4},
        Case{{30}, {.epsilon = 1e-3, .every = 2, .grafting = Grafting::rmsprop}, 1e-4},
        Case{{}, {.every = 2, .grafting = Grafting::none}, 1e-6}));

TEST(Shampoo, FirstDirectionIsTheNearestOrthogonalMatrix) {
  const int64_t n = 20;
  Held held(matrix_spec(n, n), make_shampoo({.epsilon = 1e-9, .grafting = Grafting::none}, rules_with(0)), 1);
  at::Tensor g = torch::eye(n, torch::kFloat64) * 2 +
                 in_double(normal_values(n * n, 2, 0.1f), {n, n});  // well conditioned
  const at::Tensor single = g.to(torch::kFloat32).contiguous();
  held.step({.step = 1}, Values(single.data_ptr<float>(), single.data_ptr<float>() + n * n));
  const auto [u, s, vh] = torch::linalg_svd(single.to(torch::kFloat64), false);
  EXPECT_LT(difference(held.tensor("grad"), u.matmul(vh)), 1e-5);
}

TEST(Shampoo, TilesAreMatricesOfTheirOwn) {
  const TensorSpec spec = matrix_spec(1500, 700);
  const ShampooOptions options{.epsilon = 1e-3, .block = 512, .every = 2};
  Held held(spec, make_shampoo(options, rules_with(0)), 1);
  const std::vector<UnitPlace> places = unit_places(spec, Unit::of_tile(512, 512));
  ASSERT_EQ(places.size(), 6u);
  std::vector<DenseShampoo> dense(places.size(), {.options = options});
  for (int64_t step = 1; step <= 2; ++step) {
    const Values grad = normal_values(spec.numel(), 10 + static_cast<uint64_t>(step));
    held.step({.step = step, .lr = 0}, grad);
    const at::Tensor whole = in_double(grad, spec.shape), got = held.tensor("grad");
    for (size_t i = 0; i < places.size(); ++i) {
      const UnitPlace& p = places[i];
      const auto part = [&](const at::Tensor& t) {
        return t.narrow(0, p.first / 700, p.rows).narrow(1, p.first % 700, p.columns);
      };
      EXPECT_LT(difference(part(got), dense[i].direction(part(whole).contiguous(), step)), 1e-4)
          << "tile " << i << ", step " << step;
    }
  }
}

TEST(Shampoo, PlaceAndStrideDoNotShow) {
  for (const auto& [rows, columns] : {std::pair{50, 37}, {33, 65}, {1, 90}, {200, 3}, {129, 140}}) {
    for (const Grafting grafting : {Grafting::none, Grafting::sgd, Grafting::rmsprop}) {
      const ShampooOptions options{.block = 70, .every = 2, .grafting = grafting};
      Held in_place(matrix_spec(rows, columns), make_shampoo(options, rules_with(0.1)), 3);
      Held packed = in_place, shifted = in_place;
      for (int64_t step = 1; step <= 4; ++step) {
        const Values grad = normal_values(rows * columns, 40 + static_cast<uint64_t>(step));
        const StepContext context{.step = step, .lr = 0.1f, .grad_scale = 0.3f};
        in_place.step(context, grad, Memory::in_place);
        packed.step(context, grad, Memory::packed);
        shifted.step(context, grad, Memory::shifted);
        for (const Held* other : {&packed, &shifted}) {
          for (const auto& [name, values] : in_place.fields)
            ASSERT_TRUE(same_bits(values, other->fields.at(name))) << name << ", step " << step;
          ASSERT_EQ(in_place.units, other->units) << "step " << step;
        }
      }
      EXPECT_TRUE(all_finite(in_place));
    }
  }
}

TEST(Shampoo, ExpertsAndConvolutionsAreMatrices) {
  const UpdateOps ops = make_shampoo({.block = 16, .every = 2}, rules_with(0));
  Held experts({.name = "w", .shape = {3, 20, 12}, .kind = ParamKind::expert}, ops, 1);
  Held conv({.name = "w", .shape = {20, 3, 2, 2}, .kind = ParamKind::conv}, ops, 1);
  std::vector<Held> single(3, Held(matrix_spec(20, 12), ops, 1));
  EXPECT_EQ(experts.units.at("shampoo_scale").size(), 6u);
  for (int64_t step = 1; step <= 3; ++step) {
    const StepContext context{.step = step, .lr = 0};
    const Values grad = normal_values(720, 7 + static_cast<uint64_t>(step));
    experts.step(context, grad);
    for (int64_t e = 0; e < 3; ++e) {
      const auto part = [&](const Values& v) { return Values(v.begin() + e * 240, v.begin() + (e + 1) * 240); };
      single[e].step(context, part(grad));
      EXPECT_TRUE(same_bits(part(experts.direction()), single[e].direction())) << e;
    }
    conv.step(context, Values(grad.begin(), grad.begin() + 240));
    EXPECT_TRUE(same_bits(conv.direction(), single[0].direction()));
  }
}

TEST(Shampoo, RootsAreTakenWhenTheStepSaysSo) {
  Held held(matrix_spec(6, 5), make_shampoo({.every = 3}, rules_with(0)), 1);
  std::vector<int64_t> taken;
  for (int64_t step = 1; step <= 9; ++step) {
    const Values before = held.of_unit("shampoo_left_root", 0);
    held.step({.step = step, .lr = 0}, normal_values(30, static_cast<uint64_t>(step)));
    if (held.of_unit("shampoo_left_root", 0) != before) taken.push_back(step);
  }
  EXPECT_THAT(taken, ElementsAre(1, 3, 6, 9));
}

// A parameter whose first gradient comes late: without a root at first, then with the bias of its
// own average corrected, not that of the steps it did not see.
TEST(Shampoo, LateStart) {
  Held held(matrix_spec(8, 8), make_shampoo({.every = 10, .grafting = Grafting::none}, rules_with(0)), 1);
  const Values grad = normal_values(64, 2);
  held.step({.step = 19, .lr = 0}, grad);
  EXPECT_LT(angle(held.direction(), grad), 1e-6);
  EXPECT_NEAR(norm(held.direction()), 1, 1e-5);  // of the gradient over its norm
  held.step({.step = 20, .lr = 0}, grad);
  const auto [u, s, vh] = torch::linalg_svd(in_double(grad, {8, 8}), false);
  EXPECT_LT(difference(held.tensor("grad"), u.matmul(vh)), 1e-2);  // epsilon's doing
}

TEST(Shampoo, GraftingGivesTheNorm) {
  const TensorSpec spec = matrix_spec(30, 40);
  Held none(spec, make_shampoo({.block = 25, .grafting = Grafting::none}, rules_with(0)), 1);
  Held sgd(spec, make_shampoo({.block = 25, .grafting = Grafting::sgd}, rules_with(0)), 1);
  Held rmsprop(spec, make_shampoo({.block = 25, .grafting = Grafting::rmsprop}, rules_with(0)), 1);
  at::Tensor square = torch::zeros({30, 40}, torch::kFloat64);
  for (int64_t step = 1; step <= 5; ++step) {
    Values grad = normal_values(1200, static_cast<uint64_t>(step));
    for (size_t i = 0; i < 1200; i += 3) grad[i] = 0;  // elements that never had a gradient: 0 / 0 is 0
    for (Held* held : {&none, &sgd, &rmsprop}) held->step({.step = step, .lr = 0, .grad_scale = 3}, grad);
    const at::Tensor g = in_double(grad, {30, 40}) * 3;
    square = 0.99 * square + 0.01 * g * g;
    const at::Tensor quotient = (g / (square / (1 - std::pow(0.99, step))).sqrt()).nan_to_num();
    for (const UnitPlace& p : unit_places(spec, Unit::of_tile(25, 25))) {
      const auto part = [&](const at::Tensor& t) {
        return t.narrow(0, p.first / 40, p.rows).narrow(1, p.first % 40, p.columns);
      };
      const at::Tensor d = part(none.tensor("grad"));
      EXPECT_LT(difference(part(sgd.tensor("grad")), d * (part(g).norm() / d.norm())), 1e-5);
      EXPECT_LT(difference(part(rmsprop.tensor("grad")), d * (part(quotient).norm() / d.norm())), 1e-5);
    }
  }
}

TEST(Shampoo, MagnitudeOfTheGradientDoesNotMatter) {
  const int64_t n = 12 * 9;
  for (const int power : {-100, -70, -20, 40, 100}) {  // 2^100 = 1.3e30
    const float factor = std::ldexp(1.0f, power);
    for (const Grafting grafting : {Grafting::none, Grafting::sgd, Grafting::rmsprop})
      for (const double beta2 : {0.9, 1.0}) {
        const ShampooOptions options{.beta2 = beta2, .every = 2, .grafting = grafting};
        Held plain(matrix_spec(12, 9), make_shampoo(options, rules_with(0)), 1), scaled = plain;
        for (int64_t step = 1; step <= 6; ++step) {
          const Values grad = normal_values(n, static_cast<uint64_t>(step));
          plain.step({.step = step, .lr = 0}, grad);
          scaled.step({.step = step, .lr = 0}, times(grad, factor));
          const Values wanted = grafting == Grafting::sgd ? times(plain.direction(), factor) : plain.direction();
          const bool exact = grafting != Grafting::rmsprop;
          ASSERT_TRUE(all_finite(scaled)) << power;
          // Beyond the range of fp32's squares only the norm of another method is an estimate.
          if (exact) {
            ASSERT_TRUE(same_bits(scaled.direction(), wanted)) << power << " " << step;
          } else {
            ASSERT_LT(angle(scaled.direction(), wanted), 1e-6);
            ASSERT_LE(norm(scaled.direction()), std::sqrt(n / (beta2 == 1 ? 1 : 0.1)) * 1.0001);
          }
        }
      }
  }
}

TEST(Shampoo, MagnitudeMayChange) {
  for (const Grafting grafting : {Grafting::none, Grafting::rmsprop})
    for (const double beta2 : {0.5, 1.0}) {
      const ShampooOptions options{.beta2 = beta2, .every = 3, .grafting = grafting};
      Held held(matrix_spec(7, 7), make_shampoo(options, rules_with(0)), 1);
      int64_t step = 0;
      float largest = 0;
      for (const float magnitude : {1e-44f, 1e-30f, 1.0f, 1e-30f, 1e30f, 1e-38f, 1e-44f, 1.0f, 1e36f, 1e-30f}) {
        held.step({.step = ++step, .lr = 0.1f}, normal_values(49, static_cast<uint64_t>(step), magnitude));
        ASSERT_TRUE(all_finite(held)) << step;
        ASSERT_LE(norm(held.direction()), std::sqrt(49 / (beta2 == 1 ? 1 : 0.5)) * 1.001) << step;
        if (magnitude > largest) {
          ASSERT_GT(norm(held.direction()), 0.1) << step;
        }
        largest = std::max(largest, magnitude);
      }
    }
}

TEST(Shampoo, ZeroGradients) {
  for (const Grafting grafting : {Grafting::none, Grafting::sgd, Grafting::rmsprop}) {
    Held held(matrix_spec(9, 7), make_shampoo({.beta2 = 0.5, .every = 2, .grafting = grafting}, rules_with(0)), 1);
    const Values zero(63), grad = normal_values(63, 4), start = held.weight();
    held.step({.step = 1, .lr = 0.1f}, zero);
    held.step({.step = 2, .lr = 0.1f}, grad, Memory::packed);
    EXPECT_GT(norm(held.direction()), 0);
    const Values statistics = held.of_unit("shampoo_left", 0);
    const float exponent = held.of_unit("shampoo_scale", 0)[0];
    held.step({.step = 3, .lr = 0.1f}, zero);
    EXPECT_EQ(held.direction(), zero);
    const int moved = static_cast<int>(held.of_unit("shampoo_scale", 0)[0] - exponent);
    EXPECT_TRUE(same_bits(held.of_unit("shampoo_left", 0), times(statistics, std::ldexp(0.5f, -moved))));
    for (int64_t step = 4; step <= 600; ++step) held.step({.step = step, .lr = 0.1f}, zero);
    held.step({.step = 601, .lr = 0.1f}, grad);  // through roots of what little was left
    EXPECT_TRUE(all_finite(held));
    EXPECT_GT(norm(held.direction()), 1);
    if (grafting == Grafting::none) {
      EXPECT_LE(norm(held.direction()), std::sqrt(7 / 0.5) * 1.001);
    }
  }
  // A gradient that only grad_scale makes zero is zero.
  Held held(matrix_spec(3, 3), make_shampoo({}, rules_with(0)), 1);
  held.step({.step = 1, .grad_scale = 0}, Values(9, 5));
  EXPECT_EQ(held.direction(), Values(9, 0));
}

TEST(Shampoo, RankOneIsAScaledGradient) {
  // Of rank one but for roundings, 3e-8 of it, which roots enlarge by up to epsilon^(-1/2) = 1000.
  const Values u = normal_values(30, 1), v = normal_values(21, 2), grad = outer(u, v);
  Held none(matrix_spec(30, 21), make_shampoo({.every = 2, .grafting = Grafting::none}, rules_with(0)), 1);
  Held sgd(matrix_spec(30, 21), make_shampoo({.every = 2, .grafting = Grafting::sgd}, rules_with(0)), 1);
  for (int64_t step = 1; step <= 4; ++step) {
    none.step({.step = step, .lr = 0}, grad);
    sgd.step({.step = step, .lr = 0}, grad);
    EXPECT_LT(angle(none.direction(), grad), 2e-4);
    EXPECT_NEAR(norm(none.direction()), 1, 1e-5);  // u v^T / (|u| |v|)
    EXPECT_LT(difference(sgd.tensor("grad"), in_double(grad, {30, 21})), 2e-4);
  }
}

// An epsilon that cannot save a factor of rank one: no root to rely on.
TEST(Shampoo, WithoutARootTheLastOneStays) {
  const ShampooOptions options{.beta2 = 0, .epsilon = 1e-30, .every = 1, .grafting = Grafting::none};
  const Values one = outer(normal_values(8, 1), normal_values(8, 2));
  Values good = times(normal_values(64, 3), 0.1f);
  for (size_t i = 0; i < 64; i += 9) good[i] += 2;
  Held held(matrix_spec(8, 8), make_shampoo(options, rules_with(0)), 1);

  held.step({.step = 1, .lr = 0.1f}, one);  // none yet: the gradient over its norm
  EXPECT_LT(angle(held.direction(), one), 1e-6);
  EXPECT_NEAR(norm(held.direction()), 1, 1e-5);
  EXPECT_EQ(held.of_unit("shampoo_left_root", 0), Values(36, 0));

  held.step({.step = 2, .lr = 0.1f}, good);
  const auto roots = [&] {
    return std::pair{held.of_unit("shampoo_left_root", 0), held.of_unit("shampoo_right_root", 0)};
  };
  const auto kept = roots();
  EXPECT_NE(kept.first, Values(36, 0));

  held.step({.step = 3, .lr = 0.1f}, one);
  EXPECT_EQ(roots(), kept);
  DenseShampoo dense{.options = options};
  dense.direction(in_double(good, {8, 8}), 1);
  const at::Tensor wanted = dense.left_root.matmul(in_double(one, {8, 8})).matmul(dense.right_root);
  EXPECT_LT(difference(held.tensor("grad"), wanted), 1e-4);

  held.step({.step = 4, .lr = 0.1f}, times(good, 3));  // and it recovers
  EXPECT_NE(roots(), kept);
  EXPECT_TRUE(all_finite(held));
}

TEST(Shampoo, DamagedStatisticsDoNotSpread) {
  for (const float damage : {NAN, kInfinity}) {
    Held held(matrix_spec(8, 8), make_shampoo({.every = 1}, rules_with(0)), 1);
    held.step({.step = 1, .lr = 0.1f}, normal_values(64, 1));
    const Values root = held.of_unit("shampoo_left_root", 0);
    held.of_unit("shampoo_left", 0)[4] = held.of_unit("shampoo_right", 0)[5] = damage;
    held.step({.step = 2, .lr = 0.1f}, normal_values(64, 2));
    EXPECT_EQ(held.of_unit("shampoo_left_root", 0), root);
    EXPECT_TRUE(all_finite(held.direction()) && all_finite(held.weight()));
  }
}

TEST(Shampoo, GradientsThatAreNotFiniteStayVisibleAndOutOfTheStatistics) {
  for (const float bad : {NAN, kInfinity, -kInfinity}) {
    Held held(matrix_spec(4, 4), make_shampoo({.beta1 = 0}, rules_with(0)), 1);
    held.step({.step = 1, .lr = 0.1f}, normal_values(16, 1));
    const auto before = held.units;
    const float square = held.fields.at("graft_sq")[7];
    Values grad = normal_values(16, 2);
    grad[7] = bad;
    held.step({.step = 2, .lr = 0.1f}, grad);
    EXPECT_EQ(held.units, before);
    EXPECT_EQ(held.fields.at("graft_sq")[7], square);
    EXPECT_FALSE(std::isfinite(held.weight()[7]));
  }
}

TEST(Shampoo, MomentumAndDecayByHand) {
  // One element: the direction with grafting sgd is the gradient.
  const TensorSpec spec = matrix_spec(1, 1);
  Held held(spec, make_shampoo({.beta1 = 0.5, .grafting = Grafting::sgd}, rules_with(0.1)), 1);
  held.weight() = {2};
  held.step({.step = 1, .lr = 0.5f, .grad_scale = 0.25f}, {4});
  EXPECT_FLOAT_EQ(held.weight()[0], 2 - 0.5f * 0.1f * 2 - 0.5f);  // 1.4; m / (1 - beta1) = 1
  EXPECT_FLOAT_EQ(held.fields.at("shampoo_momentum")[0], 0.5f);
  held.step({.step = 2, .lr = 0.5f}, {-2});
  const float m = 0.25f - 1;
  EXPECT_FLOAT_EQ(held.weight()[0], 1.4f - 0.5f * 0.1f * 1.4f - 0.5f / 0.75f * m);

  Held plain(spec, make_shampoo({.beta1 = 0, .grafting = Grafting::sgd},
                                ParameterRules({.rules = {{.pattern = "w", .lr_scale = 0.5}}})), 1);
  EXPECT_EQ(plain.fields.count("shampoo_momentum"), 0u);
  plain.weight() = {2};
  plain.step({.step = 1, .lr = 0.5f}, {4});
  EXPECT_FLOAT_EQ(plain.weight()[0], 2 - 0.5f * 0.5f * 4);
}

// |A (W - target) B|^2 / 2 with factors of condition 100, the best of several learning rates each.
TEST(Shampoo, BeatsSgdWhereCurvatureIsUneven) {
  const int64_t n = 24;
  const auto curvature = [&](uint64_t seed) {
    const auto [q, r] = torch::linalg_qr(in_double(normal_values(n * n, seed), {n, n}));
    return q.matmul(torch::diag(torch::logspace(0, -2, n, 10, torch::kFloat64))).matmul(q.t());
  };
  const at::Tensor a = curvature(1), b = curvature(2), target = in_double(normal_values(n * n, 3), {n, n});
  const auto loss_after = [&](const UpdateOps& ops, double lr) {
    Held held(matrix_spec(n, n), ops, 4);
    const auto error = [&] { return held.tensor("weight") - target; };
    const int64_t steps = 120;
    for (int64_t step = 1; step <= steps; ++step) {
      const at::Tensor g = a.matmul(error()).matmul(b).to(torch::kFloat32).contiguous();
      const double decreasing = lr * (1 - static_cast<double>(step - 1) / steps);
      held.step({.step = step, .lr = static_cast<float>(decreasing)},
                Values(g.data_ptr<float>(), g.data_ptr<float>() + n * n));
    }
    return (error() * a.matmul(error()).matmul(b)).sum().item<double>() / 2;
  };
  const auto best = [&](const UpdateOps& ops) {
    double least = std::numeric_limits<double>::infinity();
    for (const double lr : {0.003, 0.01, 0.03, 0.1, 0.3, 1.0}) {
      const double loss = loss_after(ops, lr);
      if (std::isfinite(loss)) least = std::min(least, loss);
    }
    return least;
  };
  const double sgd = best({std::make_shared<Sgd>(SgdOptions{.momentum = 0.9}, rules_with(0))});
  for (const Grafting grafting : {Grafting::none, Grafting::rmsprop}) {
    const double shampoo = best(make_shampoo({.beta2 = 0.95, .grafting = grafting}, rules_with(0)));
    RecordProperty(std::string(name_of(grafting)), fmt::format("{} against {}", shampoo, sgd));
    EXPECT_LT(shampoo, 0.2 * sgd) << name_of(grafting);
  }
}

}  // namespace
}  // namespace dovetail
