#include "dovetail/update/adam8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <random>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "tests/update/reference.h"

namespace dovetail {
namespace {

ParameterRules rules_with(double weight_decay) {
  return ParameterRules({.weight_decay = weight_decay});
}

TensorSpec spec_of(std::vector<int64_t> shape) { return {.name = "w", .shape = std::move(shape)}; }

std::vector<float> decoded(const Parameter& p, CodeSign sign) {
  const std::string name = sign == CodeSign::with_sign ? "exp_avg" : "exp_avg_sq";
  std::vector<float> values(p.weight.size());
  decode_blockwise8_reference(sign, p.state.at(name + "_code").u8(),
                              p.state.at(name + "_scale").f32(), values);
  return values;
}

// Case B14: whether a tensor's state is 8-bit depends on the whole tensor, and no rank count
// changes a bit.
TEST(Adam8, B14StateIsChosenByTheWholeTensor) {
  const Adam8 op({}, rules_with(0.1));
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{6, 1024}, {4100}, {1, 4096}}) {
    const TensorSpec spec = spec_of(shape);
    const int64_t blocks = ceil_div(spec.numel(), 256);
    EXPECT_EQ(op.unit(spec), Unit::of_block(256));
    const std::vector<StateField> state = op.state(spec);
    ASSERT_EQ(state.size(), 4u);
    EXPECT_EQ(state[0], (StateField{.name = "exp_avg_code", .dtype = DType::u8, .initial = 127}));
    EXPECT_EQ(state[1],
              (StateField{.name = "exp_avg_scale", .per = StateField::Per::block, .block = 256}));
    EXPECT_EQ(state[2], (StateField{.name = "exp_avg_sq_code", .dtype = DType::u8, .initial = 0}));
    EXPECT_EQ(
        state[3],
        (StateField{.name = "exp_avg_sq_scale", .per = StateField::Per::block, .block = 256}));
    for (const StateField& f : state)
      EXPECT_EQ(f.values(spec), f.dtype == DType::u8 ? spec.numel() : blocks) << f.name;
  }
  EXPECT_EQ(op.state(spec_of({4100}))[1].values(spec_of({4100})),
            17);  // the last block has 4 elements
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 1024}, {4095}, {1}, {0}}) {
    EXPECT_EQ(op.unit(spec_of(shape)), Unit{});
    EXPECT_EQ(op.state(spec_of(shape)), AdamW({}, rules_with(0)).state(spec_of(shape)));
  }
}

TEST(Adam8, B14BitsAreTheSameForEveryNumberOfRanks) {
  const Adam8 op({}, rules_with(0.1));
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{6, 1024}, {3, 1024}, {4100}, {1, 4096}}) {
    const Parameter start(spec_of(shape), 3);
    Parameter whole = start;
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      // Shards of equally many blocks (elements, where there are none), the last ones short or
      // empty.
      const int64_t block = uncut_elements(start.spec, op.unit(start.spec));
      const int64_t share = ceil_div(ceil_div(start.spec.numel(), block), ranks) * block;
      std::vector<int64_t> cuts;
      for (int64_t r = 1; r < ranks; ++r) cuts.push_back(std::min(r * share, start.spec.numel()));
      Parameter cut = start;
      for (int64_t step = 1; step <= 2; ++step) {
        cut.grad = random_values(start.spec.numel(), 40 + step, 0.3f);
        cut.run(op, {.step = step, .lr = 0.01f}, cuts);
      }
      if (ranks == 1) whole = cut;
      expect_same_bits(whole, cut, fmt::format("{} elements, {} ranks", start.spec.numel(), ranks));
    }
    EXPECT_NE(whole.weight, start.weight);
  }
}

TEST(Adam8, AnySplitAtBlocksGivesTheSameBits) {
  expect_same_bits_for_any_split(Adam8({0.9, 0.95, 1e-8}, rules_with(0.1)));
}

TEST(Adam8, RunsThatCutABlockAreRefused) {
  const Adam8 op({}, rules_with(0));
  const TensorSpec spec = spec_of({4100});
  const auto run = [&](Interval elements) {
    const int64_t n = elements.size();
    std::vector<float> weight(n), grad(n, 1), m_scale(ceil_div(n, 256)), v_scale = m_scale;
    std::vector<uint8_t> m_code(n, 127), v_code(n, 0);
    const auto field = [](std::string_view name, DType dtype, auto& values) {
      return Field{name, dtype, reinterpret_cast<std::byte*>(values.data()), std::ssize(values)};
    };
    const std::vector<Field> fields = {field(kWeight, DType::f32, weight),
                                       field(kGrad, DType::f32, grad),
                                       field("exp_avg_code", DType::u8, m_code),
                                       field("exp_avg_scale", DType::f32, m_scale),
                                       field("exp_avg_sq_code", DType::u8, v_code),
                                       field("exp_avg_sq_scale", DType::f32, v_scale)};
    const UnitPlace place{.first = elements.begin, .rows = 1, .columns = n, .stride = n};
    op.run({.tensor = &spec,
            .index = 0,
            .place = place,
            .unit = -1,
            .row_stride = n,
            .fields = fields,
            .workspace = {}},
           {.step = 1, .lr = 1});
    for (float w : weight) EXPECT_FLOAT_EQ(w, -1);  // it ran
  };
  for (Interval whole : {Interval{0, 256}, Interval{256, 1024}, Interval{4096, 4100},
                         Interval{0, 4100}, Interval{512, 512}})
    EXPECT_NO_THROW(run(whole)) << whole.begin;
  for (Interval cut :
       {Interval{0, 255}, Interval{255, 512}, Interval{1, 4100}, Interval{4096, 4099}})
    EXPECT_THROW(run(cut), InvariantError) << cut.begin;
}

TEST(Adam8, FastAndScalarGiveTheSameBits) {
  const Adam8 op({0.9, 0.99, 1e-8}, rules_with(0.1));
  for (int64_t n : {4096, 4097, 4100, 4351, 9000}) {
    Parameter fast(spec_of({n}), 9), slow = fast;
    fast.run(op, {.step = 1, .lr = 0.01f});
    slow = fast;
    for (int64_t step = 2; step <= 6; ++step) {
      const StepContext context{.step = step, .lr = 0.01f, .grad_scale = 0.3f};
      fast.grad = random_values(n, 60 + static_cast<uint64_t>(step),
                                std::pow(10.0f, static_cast<float>(step % 4) - 3));
      for (int64_t i = 0; i < n; i += 7) fast.grad[i] = 0;
      fast.run(op, context);
      auto& state = slow.state;
      const auto u8 = [&](const char* name) {
        auto& bytes = state.at(name).bytes;
        return std::span(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size());
      };
      adam8_update_reference(adamw_coefficients({0.9, 0.99, 1e-8}, {.weight_decay = 0.1}, context),
                             slow.weight, fast.grad,
                             {u8("exp_avg_code"), state.at("exp_avg_scale").f32(),
                              u8("exp_avg_sq_code"), state.at("exp_avg_sq_scale").f32()});
      expect_same_bits(fast, slow, fmt::format("{} elements, step {}", n, step));
    }
  }
}

TEST(Adam8, SmallTensorsAreAdamWToTheBit) {
  const AdamWOptions options{0.9, 0.95, 1e-8};
  Parameter ours(spec_of({3, 1024}), 4), theirs = ours;
  for (int64_t step = 1; step <= 4; ++step) {
    ours.grad = theirs.grad = random_values(3072, 80 + static_cast<uint64_t>(step), 0.1f);
    const StepContext context{.step = step, .lr = 0.01f, .grad_scale = 0.5f};
    ours.run(Adam8(options, rules_with(0.1)), context);
    theirs.run(AdamW(options, rules_with(0.1)), context);
    expect_same_bits(ours, theirs, fmt::format("step {}", step));
  }
}

// One step from any state, in double: the weights move by the exact moments, which are then kept to
// the map's precision.
TEST(Adam8, OneStepAgreesWithDouble) {
  const double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, lr = 0.0078125, decay = 0.1, scale = 0.25;
  const Adam8 op({beta1, beta2, eps}, rules_with(decay));
  Parameter p(spec_of({33, 131}), 6);
  for (int64_t step = 1; step <= 8; ++step) {
    const std::vector<float> w = p.weight;
    const bool first = step == 1;
    const std::vector<float> none(w.size());
    const auto m0 = first ? none : decoded(p, CodeSign::with_sign),
               v0 = first ? none : decoded(p, CodeSign::positive);
    p.grad = random_values(p.spec.numel(), 90 + static_cast<uint64_t>(step), 0.1f);
    p.run(op, {.step = step, .lr = lr, .grad_scale = scale});
    const auto m1 = decoded(p, CodeSign::with_sign), v1 = decoded(p, CodeSign::positive);
    const auto& m_scale = p.state.at("exp_avg_scale");
    const auto& v_scale = p.state.at("exp_avg_sq_scale");
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = p.grad[i] * scale, m = beta1 * m0[i] + (1 - beta1) * g,
                   v = beta2 * v0[i] + (1 - beta2) * g * g;
      const double t = static_cast<double>(step);
      const double update = lr * decay * w[i] + lr * (m / (1 - std::pow(beta1, t))) /
                                                    (std::sqrt(v / (1 - std::pow(beta2, t))) + eps);
      ASSERT_NEAR(p.weight[i], w[i] - update, 2e-7 * std::abs(w[i]) + 5e-6 * lr)
          << step << ", " << i;
      // Half of the widest gap between entries, and a fifth of that one decade below.
      const double m_error = std::abs(m1[i] - m), v_error = std::abs(v1[i] - v);
      const double m_largest = m_scale.f32()[i / 256], v_largest = v_scale.f32()[i / 256];
      ASSERT_LE(m_error, (std::abs(m) > 0.09 * m_largest ? 0.00704 : 0.00142) * m_largest)
          << step << ", " << i;
      ASSERT_LE(v_error, (v > 0.09 * v_largest ? 0.00352 : 0.00071) * v_largest)
          << step << ", " << i;
      if (v > 0) {
        ASSERT_GT(v1[i], 0) << step << ", " << i;
      }
    }
  }
}

TEST(Adam8, ZeroGradientsLeaveNoTrace) {
  const Adam8 op({}, rules_with(0));
  Parameter p(spec_of({5000}), 2);
  const std::vector<float> start = p.weight;
  p.grad.assign(5000, 0);
  for (int64_t step = 1; step <= 3; ++step) p.run(op, {.step = step, .lr = 0.1f});
  EXPECT_EQ(p.weight, start);
  EXPECT_THAT(decoded(p, CodeSign::with_sign), testing::Each(0));
  EXPECT_THAT(decoded(p, CodeSign::positive), testing::Each(0));

  // After a gradient, many steps without: weights stay finite, and what moved stops moving.
  p.grad = random_values(5000, 3, 1);
  p.grad[7] = 0;
  p.run(op, {.step = 4, .lr = 0.1f});
  p.grad.assign(5000, 0);
  for (int64_t step = 5; step <= 400; ++step) p.run(op, {.step = step, .lr = 0.1f});
  const std::vector<float> late = p.weight;
  EXPECT_EQ(p.weight[7], start[7]);  // never had a gradient
  p.run(op, {.step = 401, .lr = 0.1f});
  for (size_t i = 0; i < late.size(); ++i) {
    ASSERT_TRUE(std::isfinite(p.weight[i])) << i;
    ASSERT_NEAR(p.weight[i], late[i], 1e-6) << i;
  }
}

// An element whose gradients are small beside its block's, and then none: with v rounded to 0 it
// would move by lr * m / eps, some thousand times lr.
TEST(Adam8, VanishingSecondMomentsDoNotExplode) {
  const Adam8 op({0.9, 0.999, 1e-8}, rules_with(0));
  for (float small : {1e-3f, 3e-4f, 1e-4f, 1e-5f, 1e-6f}) {
    Parameter p(spec_of({4096}), 2);
    for (int64_t step = 1; step <= 30; ++step) {
      const std::vector<float> before = p.weight;
      for (size_t i = 0; i < p.grad.size(); ++i)
        p.grad[i] = i % 256 == 0 ? 1 : step % 3 == 1 ? small : 0;
      p.run(op, {.step = step, .lr = 0.01f});
      for (size_t i = 0; i < before.size(); ++i)
        ASSERT_LE(std::abs(p.weight[i] - before[i]), 0.05f)
            << small << ", step " << step << ", element " << i;
    }
  }
}

TEST(Adam8, WhatIsNotFiniteShowsInItsBlockAlone) {
  const Adam8 op({}, rules_with(0));
  Parameter p(spec_of({4096}), 2);
  p.run(op, {.step = 1, .lr = 0.1f});
  p.grad[300] = NAN;
  p.run(op, {.step = 2, .lr = 0.1f});
  EXPECT_TRUE(std::isnan(p.weight[300]));
  p.grad[300] = 0;
  p.run(op, {.step = 3, .lr = 0.1f});
  for (size_t i = 0; i < p.weight.size(); ++i)
    EXPECT_EQ(std::isnan(p.weight[i]), i / 256 == 1) << i;
}

// Least squares with noise and mini-batches: 96 inputs whose sizes go from 10^-decades to 1, so
// that second moments matter; 64 outputs; 6144 weights. Returns the mean squared error; that of the
// noise is 0.01.
double loss_after(const UpdateOp& op, double decades, double lr, int64_t steps) {
  const int64_t inputs = 96, outputs = 64, rows = 2048, batch = 256;
  const auto sizes = torch::logspace(-decades, 0, inputs);
  const auto x = to_torch(random_values(rows * inputs, 1, 1)).view({rows, inputs}) * sizes;
  const auto truth = to_torch(random_values(inputs * outputs, 2, 1)).view({inputs, outputs});
  const auto y =
      x.mm(truth) + 0.1 * to_torch(random_values(rows * outputs, 3, 1)).view({rows, outputs});
  Parameter p({.name = "w", .shape = {inputs, outputs}}, 4);
  const auto weight = torch::from_blob(p.weight.data(), {inputs, outputs});
  const auto grad = torch::from_blob(p.grad.data(), {inputs, outputs});
  for (int64_t step = 1; step <= steps; ++step) {
    const int64_t first = (step - 1) % (rows / batch) * batch;
    const auto part = x.narrow(0, first, batch);
    grad.copy_(part.t().mm(part.mm(weight) - y.narrow(0, first, batch)) * (2.0 / batch));
    const double left = 1 - static_cast<double>(step) / static_cast<double>(steps);
    p.run(op, {.step = step, .lr = static_cast<float>(lr * left)});
  }
  return (x.mm(weight) - y).square().mean().item<double>();
}

TEST(Adam8, ConvergesLikeFp32AdamW) {
  const AdamWOptions options{0.9, 0.999, 1e-8};
  const Adam8 op(options, rules_with(0));
  struct Problem {
    double decades, lr;
    double factor;  // of the losses
  };
  // With the rate that suits the problem both end at the same loss. With one that is too low the
  // loss of 8 bits is behind by up to a quarter midway: so it is with the published rounding (1.13
  // to 1.25 in a copy of this problem in Python).
  for (const Problem& q : {Problem{0, 0.1, 1.005}, Problem{2, 0.1, 1.005}, Problem{0, 0.03, 1.3},
                           Problem{2, 0.03, 1.3}}) {
    const int64_t steps = 400;
    const double start = loss_after(op, q.decades, q.lr, 0),
                 eight = loss_after(op, q.decades, q.lr, steps);
    const double full = loss_after(AdamW(options, rules_with(0)), q.decades, q.lr, steps);
    SCOPED_TRACE(
        fmt::format("{} decades, lr {}: {:.6f} at first, fp32 {:.6f}, 8-bit {:.6f}, ratio {:.4f}",
                    q.decades, q.lr, start, full, eight, eight / full));
    EXPECT_LT(full, 0.01 * start);  // the problem is one that training solves
    EXPECT_LT(eight, q.factor * full);
    EXPECT_LT(full, q.factor * eight);
    EXPECT_NE(eight, full);  // and the moments were indeed of 8 bits
  }
}

// The published map, as built by torch in fp32.
TEST(Adam8, MapIsThatOfTorch) {
  for (CodeSign sign : {CodeSign::with_sign, CodeSign::positive}) {
    std::vector<at::Tensor> parts = {torch::zeros(1), torch::ones(1)};
    for (int i = 0; i < 7; ++i) {
      const int64_t n = sign == CodeSign::with_sign ? 1 << i : 2 << i;
      const auto edges = torch::linspace(0.1, 1, n + 1);
      const auto middles =
          (edges.narrow(0, 0, n) + edges.narrow(0, 1, n)) / 2.0 * std::pow(10.0, i - 6);
      parts.push_back(middles);
      if (sign == CodeSign::with_sign) parts.push_back(-middles);
    }
    const auto wanted = std::get<0>(torch::cat(parts).sort());
    ASSERT_EQ(wanted.numel(), 256);
    for (int c = 0; c < 256; ++c) {
      const float theirs = wanted[c].item<float>();
      EXPECT_NEAR(dynamic_map(sign).values[c], theirs, 2e-7 * std::abs(theirs)) << c;
    }
  }
}

TEST(Adam8, RulesReachTheCoefficients) {
  const Adam8 op(
      {}, ParameterRules({.weight_decay = 0.5, .rules = {{.pattern = "frozen*", .lr_scale = 0}}}));
  Parameter still({.name = "frozen.w", .shape = {4096}}, 2);
  const auto before = still.weight;
  still.run(op, {.step = 1, .lr = 0.1f});
  EXPECT_EQ(still.weight, before);
  Parameter decays(spec_of({4096}), 3);
  decays.grad.assign(4096, 0);
  const auto start = decays.weight;
  decays.run(op, {.step = 1, .lr = 0.1f});
  for (size_t i = 0; i < start.size(); ++i) ASSERT_FLOAT_EQ(decays.weight[i], start[i] * 0.95f);
}

TEST(Adam8, DescriptionHasEveryHyperparameter) {
  const auto text = [](double b1, double b2, double eps, double decay) {
    return Adam8({b1, b2, eps}, rules_with(decay)).describe();
  };
  const std::string base = text(0.9, 0.999, 1e-8, 0.1);
  EXPECT_EQ(base, text(0.9, 0.999, 1e-8, 0.1));
  EXPECT_NE(base, text(0.8, 0.999, 1e-8, 0.1));
  EXPECT_NE(base, text(0.9, 0.99, 1e-8, 0.1));
  EXPECT_NE(base, text(0.9, 0.999, 1e-7, 0.1));
  EXPECT_NE(base, text(0.9, 0.999, 1e-8, 0.2));
  EXPECT_THAT(base,
              testing::StartsWith(
                  "adam8 beta1=0.9 beta2=0.999 eps=1e-08 block=256 least_8bit_elements=4096 "));
}

TEST(Adam8, RefusesWhatIsNoOptimizer) {
  expect_bad_adam_options_are_refused(
      [](double b1, double b2, double eps) { Adam8({b1, b2, eps}, rules_with(0)); });
}

TEST(Adam8, SpansAreChecked) {
  std::vector<float> w(300), two(2), one(1);
  std::vector<uint8_t> codes(300), few(299);
  const auto c = adamw_coefficients({}, {}, {.step = 1, .lr = 1});
  EXPECT_NO_THROW(adam8_update(c, w, w, {codes, two, codes, two}));
  EXPECT_THROW(adam8_update(c, w, two, {codes, two, codes, two}), InvariantError);
  EXPECT_THROW(adam8_update(c, w, w, {few, two, codes, two}), InvariantError);
  EXPECT_THROW(adam8_update(c, w, w, {codes, one, codes, two}), InvariantError);
  EXPECT_THROW(adam8_update(c, w, w, {codes, two, few, two}), InvariantError);
  EXPECT_THROW(adam8_update(c, w, w, {codes, two, codes, one}), InvariantError);
}

}  // namespace
}  // namespace dovetail
