#include "dovetail/ops/unit.h"

#include <torch/nn.h>

#include "dovetail/ops/linear.h"
#include "dovetail/ops/recompute.h"
#include "testing.h"

namespace dovetail::ops {
namespace {

using namespace testing;

struct Output {
  at::Tensor y;
  std::pair<at::Tensor, int> more;
};
template <class F>
void visit_members(Output& o, F&& f) {
  f(o.y);
  f(o.more);
}

struct Block : torch::nn::Module {
  Block(int64_t dim, double dropout) : dropout(dropout) {
    first = register_module("first", std::make_shared<Linear>(dim, 2 * dim));
    second = register_module("second", std::make_shared<Linear>(2 * dim, dim, false));
    torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.normal_(0, 0.5);
  }
  Output forward(const at::Tensor& x, const std::vector<at::Tensor>& extra, double scale) {
    ++runs;
    auto h = first->forward(x).tanh();
    if (dropout > 0) h = torch::dropout(h, dropout, true);
    const auto y = second->forward(h) * scale + extra[0];
    return {y, {y.exp(), 3}};
  }
  std::shared_ptr<Linear> first, second;
  double dropout;
  int runs = 0;
};

struct CountingHooks : UnitHooks {
  void before_forward(std::span<at::Tensor* const> inputs) override {
    ++before;
    in = inputs.size();
  }
  void after_forward(std::span<at::Tensor* const> outputs) override {
    ++after;
    out = outputs.size();
    if (on_output) on_output(outputs);
  }
  void forward_failed() noexcept override { ++failed; }
  std::function<void(std::span<at::Tensor* const>)> on_output;
  int before = 0, after = 0, failed = 0;
  size_t in = 0, out = 0;
};

std::vector<at::Tensor> gradients(Unit<Block>& unit, const at::Tensor& x, const at::Tensor& extra) {
  unit.zero_grad();
  const auto lx = x.detach().clone().set_requires_grad(x.requires_grad());
  const auto le = extra.detach().clone().set_requires_grad(true);
  const auto out = unit.forward(lx, std::vector<at::Tensor>{le}, 0.5);
  EXPECT_EQ(out.more.second, 3);
  (out.y.sum() + out.more.first.sum() + torch::rand({1}).sum() * 0).backward();
  std::vector<at::Tensor> found = {out.y.detach(), le.grad()};
  if (x.requires_grad()) found.push_back(lx.grad());
  for (auto& p : unit.parameters()) found.push_back(p.grad().clone());
  found.push_back(torch::rand({2}));  // the generator stands where it would
  return found;
}

TEST(Unit, RecomputationGivesTheSameBits) {
  for (double dropout : {0.0, 0.4})
    for (bool input_trains : {true, false}) {
      torch::manual_seed(1);
      auto unit = std::make_shared<Unit<Block>>(5, dropout);
      const auto x = torch::randn({3, 5}).set_requires_grad(input_trains),
                 extra = torch::randn({3, 5});
      torch::manual_seed(7);
      const auto want = gradients(*unit, x, extra);
      EXPECT_EQ(unit->runs, 1);
      unit->set_recompute(true);
      torch::manual_seed(7);
      const auto got = gradients(*unit, x, extra);
      EXPECT_EQ(unit->runs, 3);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same_bits(got[i], want[i])) << i;
    }
}

TEST(Unit, HooksStayOutsideOfTheSecondRun) {
  auto unit = std::make_shared<Unit<Block>>(4, 0.0);
  const auto hooks = std::make_shared<CountingHooks>();
  unit->attach(hooks);
  unit->set_recompute(true);
  gradients(*unit, torch::randn({2, 4}), torch::randn({2, 4}));
  EXPECT_EQ(unit->runs, 2);
  EXPECT_EQ(hooks->before, 1);
  EXPECT_EQ(hooks->after, 1);
  EXPECT_EQ(hooks->in, 2u);
  EXPECT_EQ(hooks->out, 2u);
  EXPECT_ANY_THROW(
      unit->forward(torch::randn({2, 3}), std::vector<at::Tensor>{torch::randn({2, 4})}, 1.0));
  EXPECT_EQ(hooks->failed, 1);
}

// The unit's parameters hold no bytes between forward and backward, and other memory afterwards.
TEST(Unit, ParametersUnboundBetweenForwardAndBackward) {
  torch::manual_seed(2);
  auto unit = std::make_shared<Unit<Block>>(4, 0.0);
  const auto x = torch::randn({2, 4}).set_requires_grad(true), extra = torch::randn({2, 4});
  const auto want = gradients(*unit, x, extra);
  std::vector<at::Tensor> values;
  const auto bind = [&](bool on) {
    auto parameters = unit->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto* storage = parameters[i].storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(on ? c10::DataPtr(values[i].data_ptr(), at::kCPU)
                                      : c10::DataPtr(nullptr, at::kCPU));
    }
  };
  for (auto& p : unit->parameters()) values.push_back(p.detach().clone());
  const auto hooks = std::make_shared<CountingHooks>();
  hooks->on_output = [&](std::span<at::Tensor* const> outputs) {
    bind(false);
    outputs[1]->register_hook([&](const at::Tensor&) { bind(true); });
  };
  unit->attach(hooks);
  unit->set_recompute(true);
  const auto got = gradients(*unit, x, extra);
  for (size_t i = 0; i + 1 < got.size(); ++i) EXPECT_TRUE(same_bits(got[i], want[i])) << i;
}

TEST(Unit, RecomputationIsOffWithoutGradMode) {
  auto unit = std::make_shared<Unit<Block>>(4, 0.0);
  unit->set_recompute(true);
  torch::NoGradGuard no_grad;
  const auto out =
      unit->forward(torch::randn({2, 4}), std::vector<at::Tensor>{torch::randn({2, 4})}, 1.0);
  EXPECT_FALSE(out.y.requires_grad());
  EXPECT_EQ(unit->runs, 1);
}

TEST(Unit, GraphKeepsARecomputedModuleAlive) {
  auto unit = std::make_shared<Unit<Block>>(4, 0.0);
  unit->set_recompute(true);
  const auto x = torch::randn({2, 4}).set_requires_grad(true);
  const auto y = unit->forward(x, std::vector<at::Tensor>{torch::randn({2, 4})}, 1.0).y.sum();
  unit.reset();
  y.backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Recompute, LimitsAreNamed) {
  const auto x = torch::randn({3}).set_requires_grad(true);
  const auto run = [&] {
    return recompute([](const Tensors& in) { return Tensors{in[0].exp()}; }, {x}, false)[0].sum();
  };
  EXPECT_NE(
      message_of<StateError>([&] { torch::autograd::grad({run()}, {x}); }).find("autograd::grad"),
      std::string::npos);
  EXPECT_NE(message_of<StateError>([&] { run().backward({}, true, true); }).find("create_graph"),
            std::string::npos);
  int calls = 0;
  const auto unsteady = recompute(
      [&](const Tensors& in) { return ++calls == 1 ? Tensors{in[0] * 2} : Tensors{}; }, {x}, false);
  EXPECT_NE(message_of<StateError>([&] {
              unsteady[0].sum().backward();
            }).find("1 outputs the first time, 0 when run again"),
            std::string::npos);
}

TEST(Recompute, KeepsGraphForASecondBackwardAndNests) {
  const auto x = torch::randn({3}).set_requires_grad(true);
  const auto y = recompute(
      [](const Tensors& in) {
        return recompute([](const Tensors& inner) { return Tensors{inner[0].pow(3), inner[1]}; },
                         {in[0], in[1]}, false);
      },
      {x, torch::tensor({1, 2}, at::kLong)}, false);
  EXPECT_EQ(y[1].scalar_type(), at::kLong);
  y[0].sum().backward({}, true);
  y[0].sum().backward();
  expect_close(x.grad(), 6 * x.pow(2), 1e-5);
}

// Arguments behind a shared pointer would be changed under their owner.
struct SharedBlock : torch::nn::Module {
  at::Tensor forward(const std::shared_ptr<at::Tensor>& x) { return x->exp(); }
};
TEST(Unit, SharedArgumentsAreRefused) {
  auto unit = std::make_shared<Unit<SharedBlock>>();
  const auto x = std::make_shared<at::Tensor>(torch::ones({1}).set_requires_grad(true));
  EXPECT_TRUE(unit->forward(x).defined());
  unit->set_recompute(true);
  EXPECT_THROW(unit->forward(x), StateError);
  EXPECT_EQ(x->item<float>(), 1);
}

// Built without memory, then given some: a buffer is rebuilt in its own type, or named.
struct WithBuffers : torch::nn::Module, Materializable {
  explicit WithBuffers(const at::TensorOptions& options) {
    linear = register_module("linear", std::make_shared<Linear>(4, 4, true, options));
    tied = register_module("tied", std::make_shared<Linear>(linear->weight));
    frequencies = register_buffer(
        "frequencies", torch::empty({4}, at::TensorOptions(at::kMeta).dtype(at::kFloat)));
    count =
        register_buffer("count", torch::empty({}, at::TensorOptions(at::kMeta).dtype(at::kLong)));
  }
  void materialize(TensorMaker& maker) override {
    maker.buffer(*this, "frequencies", frequencies,
                 at::pow(10.0, -torch::arange(4, at::kFloat) / 4));
    maker.buffer(*this, "count", count, torch::tensor(3, at::kLong));
  }
  std::shared_ptr<Linear> linear, tied;
  at::Tensor frequencies, count;
};

TEST(Materialize, ParametersAndBuffers) {
  WithBuffers module(at::TensorOptions(at::kMeta).dtype(at::kBFloat16));
  module.linear->weight.set_requires_grad(false);
  EXPECT_TRUE(module.linear->weight.is_meta());
  materialize(module, at::kCPU);
  for (const auto& p : module.named_parameters()) {
    EXPECT_FALSE(p.value().is_meta()) << p.key();
    EXPECT_EQ(p.value().scalar_type(), at::kBFloat16);
  }
  EXPECT_TRUE(module.named_parameters()["linear.weight"].is_same(module.linear->weight));
  EXPECT_TRUE(module.tied->weight.is_same(module.linear->weight));
  EXPECT_FALSE(module.linear->weight.requires_grad());
  EXPECT_TRUE(module.linear->bias.requires_grad());
  EXPECT_TRUE(at::allclose(module.named_buffers()["frequencies"],
                           torch::tensor({1.f, .56234f, .31623f, .17783f}), 1e-4));
  EXPECT_EQ(module.named_buffers()["frequencies"].scalar_type(), at::kFloat);
  EXPECT_EQ(module.named_buffers()["count"].item<int64_t>(), 3);
}

struct Unable : torch::nn::Module {
  Unable() { register_buffer("table", torch::empty({4}, at::kMeta)); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TEST(Materialize, NamesTheBufferThatCannotBeRebuilt) {
  torch::nn::Sequential module(Unable{});
  EXPECT_NE(message_of<ConfigError>([&] { materialize(*module, at::kCPU); }).find("buffer 0.table"),
            std::string::npos);
}

}  // namespace
}  // namespace dovetail::ops
