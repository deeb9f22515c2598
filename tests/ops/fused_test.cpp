// The fused operations against compositions of ATen operations in fp64: values, gradients, second
// order.
#include <cmath>

#include "dovetail/ops/cross_entropy.h"
#include "dovetail/ops/norm.h"
#include "dovetail/ops/rotary.h"
#include "dovetail/ops/swiglu.h"
#include "testing.h"

namespace dovetail::ops {
namespace {

using namespace testing;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

Tensors leaves(const Tensors& values, at::ScalarType type) {
  Tensors out;
  for (const auto& v : values)
    out.push_back(v.detach().to(type, false, true).set_requires_grad(true));
  return out;
}

void compare(const Function& ours, const Function& plain, const Tensors& values,
             at::ScalarType type, double bound) {
  Tensors rounded;
  for (const auto& v : values) rounded.push_back(v.to(type));
  const Tensors a = leaves(rounded, type), b = leaves(rounded, at::kDouble);
  const at::Tensor got = ours(a), want = plain(b);
  expect_close(got, want, bound, "value");
  const at::Tensor g = torch::randn(want.sizes()).to(got.scalar_type());
  got.backward(g);
  want.backward(g.to(at::kDouble));
  for (size_t i = 0; i < a.size(); ++i)
    expect_close(a[i].grad(), b[i].grad(), bound, "gradient " + std::to_string(i));
}

void compare_second_order(const Function& ours, const Function& plain, const Tensors& values) {
  const auto second = [&](const Function& f, at::ScalarType type) {
    const Tensors in = leaves(values, type);
    at::Tensor total = torch::zeros({}, type);
    for (const auto& g : torch::autograd::grad({f(in).pow(3).sum()}, in, {}, true, true))
      total = total + g.pow(2).sum();
    total.backward();
    Tensors grads;
    for (const auto& t : in) grads.push_back(t.grad());
    return grads;
  };
  const Tensors got = second(ours, at::kFloat), want = second(plain, at::kDouble);
  for (size_t i = 0; i < got.size(); ++i) expect_close(got[i], want[i], 1e-4);
}

// An epsilon of 1 keeps the gradient of one-element rows away from 0, where nothing but rounding is
// left.
at::Tensor plain_norm(const Tensors& in) {
  return in[0] * (in[0].pow(2).mean(-1, true) + 1.0).rsqrt() * in[1];
}

const std::vector<std::vector<int64_t>> kShapes = {{4, 16},   {3, 5, 33}, {1, 1}, {0, 7},
                                                   {100, 40}, {2, 513},   {70, 1}};

TEST(RmsNorm, ValuesAndGradients) {
  torch::manual_seed(1);
  for (auto type : {at::kFloat, at::kBFloat16})
    for (const auto& shape : kShapes)
      compare([](const Tensors& in) { return rms_normalize(in[0], in[1], 1.0); }, plain_norm,
              {torch::randn(shape) * 3, torch::randn({shape.back()})}, type, bound_of(type) * 2);
  compare_second_order([](const Tensors& in) { return rms_normalize(in[0], in[1], 1.0); },
                       plain_norm, {torch::randn({6, 10}), torch::randn({10})});
}

TEST(RmsNorm, StridedInputAndErrors) {
  torch::manual_seed(2);
  compare([](const Tensors& in) { return rms_normalize(in[0].t(), in[1], 1.0); },
          [](const Tensors& in) { return plain_norm({in[0].t(), in[1]}); },
          {torch::randn({9, 4}), torch::randn({9})}, at::kFloat, 2e-5);
  EXPECT_THROW(rms_normalize(torch::zeros({2, 3}), torch::zeros({4}), 1e-5), ConfigError);
  EXPECT_THROW(rms_normalize(torch::zeros({2, 4}), torch::zeros({4}).to(at::kBFloat16), 1e-5),
               ConfigError);
  EXPECT_THROW(
      rms_normalize(torch::zeros({2, 4}).to(at::kDouble), torch::zeros({4}).to(at::kDouble), 1e-5),
      ConfigError);
}

// One gradient for any number of threads: the sums are cut at fixed rows.
TEST(RmsNorm, BitsDoNotDependOnThreads) {
  torch::manual_seed(3);
  const int before = at::get_num_threads();
  const auto x = torch::randn({1000, 96}), w = torch::randn({96}), g = torch::randn({1000, 96});
  Tensors found;
  for (int threads : {1, 2}) {
    at::set_num_threads(threads);
    const Tensors in = leaves({x, w}, at::kFloat);
    rms_normalize(in[0], in[1], 1.0).backward(g);
    found.push_back(in[1].grad());
  }
  at::set_num_threads(before);
  EXPECT_TRUE(same_bits(found[0], found[1]));
}

TEST(Swiglu, ValuesAndGradients) {
  torch::manual_seed(4);
  const Function ours = [](const Tensors& in) { return swiglu(in[0], in[1]); };
  const Function plain = [](const Tensors& in) { return at::silu(in[0]) * in[1]; };
  for (auto type : {at::kFloat, at::kBFloat16})
    for (const auto& shape : kShapes)
      compare(ours, plain, {torch::randn(shape) * 4, torch::randn(shape)}, type, bound_of(type));
  compare(ours, plain, {torch::randn({5000}), torch::randn({5000})}, at::kFloat, 2e-5);
  compare_second_order(ours, plain, {torch::randn({6, 10}), torch::randn({6, 10})});
  EXPECT_THROW(swiglu(torch::zeros({2}), torch::zeros({3})), ConfigError);
}

TEST(Swiglu, ExtremesAreFinite) {
  const auto a = torch::tensor({-1e4f, -100.f, 0.f, 100.f, 1e4f});
  const auto got = swiglu(a, torch::ones({5}));
  EXPECT_TRUE(at::allclose(got, at::silu(a), 1e-5, 1e-6)) << got;
  EXPECT_TRUE(swiglu(torch::full({1}, NAN), torch::ones({1})).isnan().all().item<bool>());
}

at::Tensor plain_rotation(const at::Tensor& x, int64_t heads, double base) {
  const int64_t d = x.size(2) / heads, length = x.size(1);
  const auto t = x.view({x.size(0), length, heads, d});
  const auto frequency = at::pow(base, -torch::arange(0, d, 2, at::kDouble) / d);
  const auto angle = at::outer(torch::arange(length, at::kDouble), frequency).unsqueeze(1);
  const auto a = t.slice(-1, 0, d / 2), b = t.slice(-1, d / 2, d);
  return at::cat({a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()}, -1);
}

TEST(Rotary, ValuesAndGradients) {
  torch::manual_seed(5);
  const auto table = std::make_shared<const RotaryTable>(6, 40, 10000.0);
  for (auto type : {at::kFloat, at::kBFloat16})
    for (const auto& [batch, length, heads] :
         std::vector<std::array<int64_t, 3>>{{2, 40, 3}, {1, 1, 1}, {0, 4, 2}, {3, 0, 2}})
      for (auto out : {type, at::kFloat})
        compare(
            [&](const Tensors& in) { return rotate_heads(in[0], table, out); },
            [&, heads = heads](const Tensors& in) { return plain_rotation(in[0], heads, 10000.0); },
            {torch::randn({batch, length, heads * 6})}, type, bound_of(type));
  compare_second_order([&](const Tensors& in) { return rotate_heads(in[0], table, at::kFloat); },
                       [&](const Tensors& in) { return plain_rotation(in[0], 3, 10000.0); },
                       {torch::randn({2, 8, 18})});
}

TEST(Rotary, NamesWhatDoesNotFit) {
  const auto table = std::make_shared<const RotaryTable>(4, 8, 10000.0);
  EXPECT_NE(message_of<ConfigError>([&] {
              rotate_heads(torch::zeros({1, 9, 8}), table, at::kFloat);
            }).find("a sequence of 9 is longer than the 8 positions"),
            std::string::npos);
  EXPECT_THROW(rotate_heads(torch::zeros({1, 8, 6}), table, at::kFloat), ConfigError);
  EXPECT_THROW(RotaryTable(5, 8, 10000.0), ConfigError);
}

TEST(CrossEntropy, ValuesAndGradients) {
  torch::manual_seed(6);
  for (auto type : {at::kFloat, at::kBFloat16})
    for (auto use : {LogitsUse::keep, LogitsUse::overwrite})
      for (const auto& shape :
           std::vector<std::vector<int64_t>>{{5, 7}, {2, 3, 33}, {1, 1}, {0, 4}, {64, 300}}) {
        const std::vector<int64_t> lead(shape.begin(), shape.end() - 1);
        auto targets = torch::randint(0, shape.back(), lead, at::kLong);
        if (targets.numel() > 3) targets.view(-1)[2] = -100;
        const auto ours = [&](const Tensors& in) {
          // An overwritten leaf would be a user's value: in a model the logits are an intermediate.
          const LossSum loss = softmax_cross_entropy(in[0] * 1, targets, use);
          EXPECT_EQ(loss.count, targets.numel() - (targets.numel() > 3));
          EXPECT_EQ(loss.sum.scalar_type(), at::kFloat);
          return loss.sum;
        };
        const auto plain = [&](const Tensors& in) {
          return at::nll_loss(at::log_softmax(in[0], -1).view({-1, shape.back()}), targets.view(-1),
                              {}, at::Reduction::Sum, -100);
        };
        compare(ours, plain, {torch::randn(shape) * 5}, type, bound_of(type));
      }
}

TEST(CrossEntropy, LargeAndMaskedLogits) {
  const auto logits =
      torch::tensor({{1000.f, -1000.f, 999.f}, {-INFINITY, 0.f, 0.f}}).set_requires_grad(true);
  const auto loss = softmax_cross_entropy(logits, torch::tensor({0, 1}, at::kLong));
  loss.sum.backward();
  EXPECT_NEAR(loss.sum.item<float>(), std::log1p(std::exp(-1.0)) + std::log(2.0), 1e-5);
  EXPECT_NEAR(logits.grad()[1][0].item<float>(), 0, 1e-30);
  EXPECT_FALSE(logits.grad().isnan().any().item<bool>());
  EXPECT_EQ(softmax_cross_entropy(logits.detach(), torch::tensor({-100, -100}, at::kLong))
                .sum.item<float>(),
            0);
}

TEST(CrossEntropy, LimitsAreNamed) {
  const auto x = torch::randn({2, 3}).set_requires_grad(true);
  const auto targets = torch::zeros({2}, at::kLong);
  const auto loss = softmax_cross_entropy(x * 1, targets, LogitsUse::overwrite).sum;
  loss.backward({}, true);
  EXPECT_NE(message_of<StateError>([&] { loss.backward(); }).find("overwrote the logits"),
            std::string::npos);
  const auto kept = softmax_cross_entropy(x, targets).sum;
  kept.backward({}, true);
  kept.backward({}, true);  // as often as one likes
  EXPECT_NE(message_of<StateError>([&] { kept.backward({}, true, true); }).find("create_graph"),
            std::string::npos);
  EXPECT_NE(message_of<ConfigError>([&] {
              softmax_cross_entropy(x, torch::tensor({0, 3}, at::kLong));
            }).find("target 3 at position 1 is outside [0, 3)"),
            std::string::npos);
  EXPECT_THROW(softmax_cross_entropy(x, torch::zeros({3}, at::kLong)), ConfigError);
}

}  // namespace
}  // namespace dovetail::ops
