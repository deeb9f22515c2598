// A backward pass in which a function of the graph throws: training goes on as if it had not been.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;

// Throws in backward while `on`: behind it lie half of the blocks and the input projection.
struct Trap : torch::autograd::Function<Trap> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const bool* on) {
    context->saved_data["on"] = reinterpret_cast<int64_t>(on);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    if (*reinterpret_cast<const bool*>(context->saved_data["on"].toInt())) throw std::runtime_error("trap");
    return {grads[0], at::Tensor()};
  }
};

struct Trapped : torch::nn::Module {
  explicit Trapped(const bool* on) : on(on) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<ops::Unit<Block>>(6, 10)));
    in = register_parameter("in", at::empty({5, 6}));
  }
  at::Tensor forward(at::Tensor x) {
    x = at::matmul(x, in);
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (i == 2) x = Trap::apply(x, on);
      x = blocks[i]->forward(x);
    }
    return x.square().mean();
  }
  const bool* on;
  std::vector<std::shared_ptr<ops::Unit<Block>>> blocks;
  at::Tensor in;
};

class BrokenBackward : public ::testing::TestWithParam<std::tuple<Transport, int>> {};

// What the model is after three steps. `broken`: with passes that throw in between.
std::string trained(comm::Group& world, const EngineOptions& options, bool broken) {
  bool on = false;
  auto model = std::make_shared<ops::Unit<Trapped>>(&on);
  initialise(*model, 4);
  Engine engine(model, borrow(world), options, adamw());
  const auto loss = [&](int step) { return model->forward(batch(3 * step + world.rank(), {4, 5})); };
  for (int step = 0; step < 3; ++step) {
    at::Tensor value = loss(step);
    if (broken) {
      on = true;
      EXPECT_THROW(value.backward({}, /*retain_graph=*/true), std::runtime_error);
      on = false;
      if (step < 2) {
        EXPECT_FALSE(engine.in_backward());  // else zero_grad() leaves it
      }
      if (step == 1) {  // the graph is still good
        engine.discard_gradients();
      } else {
        engine.zero_grad();
        value = loss(step);
      }
    }
    value.backward();
    EXPECT_GT(engine.step(0.1f, 1).grad_norm, 0);
  }
  return bits(whole_parameters(engine));
}

TEST_P(BrokenBackward, LeavesNothingBehind) {
  const auto [transport, ranks] = GetParam();
  for (const plan::Degrees& d : plan::legal_chains(ranks))
    for (const std::string format : {"fp32", "bf16"}) {
      std::string results[2];
      for (const bool broken : {false, true})
        run_ranks(transport, ranks, [&, d](comm::Group& world) {
          const std::string got = trained(world, options(d.zero1, d.zero2, d.zero3, format), broken);
          if (world.rank() == 0) results[broken] = got;
        });
      EXPECT_EQ(results[true], results[false]) << plan::to_text(d) << " " << format;
    }
}

// What was reduced before it threw is there, as elsewhere in torch; the step takes it.
TEST_P(BrokenBackward, IsLeftByTheNextBackwardPassToo) {
  const auto [transport, ranks] = GetParam();
  run_ranks(transport, ranks, [ranks](comm::Group& world) {
    bool on = true;
    auto model = std::make_shared<ops::Unit<Trapped>>(&on);
    initialise(*model, 4);
    Engine engine(model, borrow(world), options(ranks, ranks, ranks), adamw());
    const at::Tensor value = model->forward(batch(world.rank(), {4, 5}));
    EXPECT_THROW(value.backward({}, /*retain_graph=*/true), std::runtime_error);
    engine.discard_gradients();
    on = false;
    value.backward();  // without a forward pass in between
    const at::Tensor gradient = whole_gradient(engine, "block0.up.weight");
    engine.zero_grad();
    model->forward(batch(world.rank(), {4, 5})).backward();
    EXPECT_TRUE(at::equal(gradient, whole_gradient(engine, "block0.up.weight")));
    EXPECT_GT(gradient.abs().sum().item<float>(), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BrokenBackward,
                         ::testing::Combine(::testing::Values(Transport::threads, Transport::peer, Transport::gloo),
                                            ::testing::Values(1, 2, 4)),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace dovetail
