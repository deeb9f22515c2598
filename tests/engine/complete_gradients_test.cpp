// Owners that read gradients after each backward pass, at every degree.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;

class CompleteGradients : public ::testing::TestWithParam<std::tuple<Transport, int>> {};

// The shard of `whole` that the parameter's owner has.
at::Tensor shard_of(const at::Tensor& whole, const UpdateParameter& p) {
  return whole.flatten().slice(0, p.elements.begin, p.elements.end);
}

TEST_P(CompleteGradients, AreThereAfterEachPassAndKeepWhatOwnersWrote) {
  const auto [transport, ranks] = GetParam();
  auto plain = make_net();
  std::vector<std::vector<at::Tensor>> sums;  // after each pass, per parameter
  for (int pass = 0; pass < 3; ++pass) {
    for (int r = 0; r < ranks; ++r) plain->forward(batch(10 * pass + r, {2, 5})).pow(2).sum().backward();
    auto& sum = sums.emplace_back();
    for (const auto& p : plain->parameters()) sum.push_back(p.grad().defined() ? p.grad().clone() : at::zeros_like(p));
  }
  std::vector<std::string> names;
  for (const auto& p : plain->named_parameters()) names.push_back(p.key());

  for (const plan::Degrees& d : plan::legal_chains(ranks)) {
    run_ranks(transport, ranks, [&, d](comm::Group& world) {
      auto net = make_net();
      Engine engine(net, borrow(world), options(d.zero1, d.zero2, d.zero3), adamw());
      engine.set_gradient_completion(true);
      auto backward = [&](int pass) { net->forward(batch(10 * pass + world.rank(), {2, 5})).pow(2).sum().backward(); };
      auto expect = [&](int pass, double factor, int since) {
        for (const UpdateParameter& p : engine.parameters()) {
          const auto at = std::find(names.begin(), names.end(), p.spec->name) - names.begin();
          at::Tensor want = sums[pass][at];
          if (since >= 0) want = want - sums[since][at] + factor * sums[since][at];
          EXPECT_TRUE(at::allclose(p.grad, shard_of(want, p), 1e-4, 1e-5))
              << p.spec->name << " after pass " << pass << " with degrees " << plan::to_text(d);
        }
      };
      backward(0);
      expect(0, 1, -1);
      backward(1);
      expect(1, 1, -1);
      for (UpdateParameter& p : engine.parameters()) p.grad.mul_(0.5);
      backward(2);
      expect(2, 0.5, 1);
      const at::Tensor whole = whole_gradient(engine, names[0]);
      EXPECT_TRUE(at::allclose(whole, sums[2][0] - 0.5 * sums[1][0], 1e-4, 1e-5)) << plan::to_text(d);
      engine.zero_grad();
      backward(0);
      expect(0, 1, -1);
      engine.step(0, 1);
      backward(0);
      expect(0, 1, -1);
    });
  }
}

// One pass a step: completing early or at the step gives the same bits.
TEST_P(CompleteGradients, GiveTheBitsOfTheStep) {
  const auto [transport, ranks] = GetParam();
  for (const plan::Degrees& d : plan::legal_chains(ranks)) {
    std::string results[2];
    for (const bool early : {false, true}) {
      run_ranks(transport, ranks, [&, d](comm::Group& world) {
        auto net = make_net();
        Engine engine(net, borrow(world), options(d.zero1, d.zero2, d.zero3), adamw());
        engine.set_gradient_completion(early);
        for (int step = 0; step < 3; ++step) {
          net->forward(batch(10 * step + world.rank(), {2, 5})).pow(2).sum().backward();
          EXPECT_GT(engine.step(0.1f, 1).grad_norm, 0);
        }
        const std::string got = bits(whole_parameters(engine));
        if (world.rank() == 0) results[early] = got;
      });
    }
    EXPECT_EQ(results[0], results[1]) << plan::to_text(d);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CompleteGradients,
                         ::testing::Combine(::testing::Values(Transport::threads, Transport::peer, Transport::hosts),
                                            ::testing::Values(2, 4)),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace dovetail
