// Units whose parameters are used behind others (ModelUnit::behind_units): the same training as in one unit with the
// root's, reduced before the others from the second step on.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>

#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;

constexpr int64_t kVocabulary = 32, kWidth = 8, kBlocks = 2;

// A model whose owner drives the units: an embedding, blocks, a head.
struct ByHand {
  explicit ByHand(bool split) {
    auto leaf = [&](int64_t seed, at::IntArrayRef shape) {
      at::Tensor t = batch(seed, shape).mul(0.3);
      return t.set_requires_grad(true);
    };
    embedding = leaf(1, {kVocabulary, kWidth});
    head = leaf(2, {kVocabulary, kWidth});
    for (int64_t b = 0; b < kBlocks; ++b) {
      blocks.push_back(leaf(3 + b, {kWidth, kWidth}));
      model.units.push_back({.name = "block" + std::to_string(b), .parameters = {{.name = "w" + std::to_string(b),
                                                                                   .tensor = blocks.back()}}});
    }
    if (split)
      model.units.push_back({.name = "(behind)", .parameters = {{.name = "head", .tensor = head}},
                             .keep_after_forward = true, .behind_units = true});
    model.units.push_back({.name = "", .parameters = {{.name = "embedding", .tensor = embedding}}});
    if (!split) model.units.back().parameters.push_back({.name = "head", .tensor = head});
  }

  at::Tensor loss(Engine& engine, int64_t step, bool with_head = true) {
    const int64_t root = std::ssize(model.units) - 1, behind = root > kBlocks ? kBlocks : -1;
    engine.hooks(root)->before_forward({});
    if (behind >= 0) engine.hooks(behind)->before_forward({});
    at::Tensor x = at::embedding(embedding, at::arange(6).add(5 * step).remainder(kVocabulary));
    for (int64_t b = 0; b < kBlocks; ++b) {
      at::Tensor* const in[] = {&x};
      engine.hooks(b)->before_forward(in);
      x = x + at::matmul(x, blocks[b]).tanh();
      at::Tensor* const out[] = {&x};
      engine.hooks(b)->after_forward(out);
    }
    at::Tensor y = with_head ? at::matmul(x, head.t()).logsumexp(1).sum() : x.square().sum();
    at::Tensor* const out[] = {&y};
    if (behind >= 0) engine.hooks(behind)->after_forward(out);
    engine.hooks(root)->after_forward(out);
    return y;
  }

  at::Tensor embedding, head;
  std::vector<at::Tensor> blocks;
  UnitModel model;
};

class Behind : public ::testing::TestWithParam<std::tuple<Transport, int>> {};

TEST_P(Behind, TrainsAsInOneUnitAtEveryDegree) {
  const auto [transport, ranks] = GetParam();
  for (const plan::Degrees& d : plan::legal_chains(ranks))
    for (const std::string format : {"fp32", "bf16"}) {
      std::string results[2];
      for (const bool split : {false, true})
        run_ranks(transport, ranks, [&, d](comm::Group& world) {
          ByHand hand(split);
          Engine engine(hand.model, borrow(world), options(d.zero1, d.zero2, d.zero3, format), adamw());
          for (int step = 0; step < 4; ++step) {
            hand.loss(engine, 10 * step + world.rank()).backward();
            EXPECT_GT(engine.step(0.1f, 1).grad_norm, 0);
            const at::NoGradGuard no_grad;  // and an evaluation in between
            hand.loss(engine, step);
          }
          std::vector<at::Tensor> all;
          for (const char* name : {"embedding", "head", "w0", "w1"}) all.push_back(whole_parameter(engine, name));
          const std::string got = bits(all);
          if (world.rank() == 0) results[split] = got;
        });
      EXPECT_EQ(results[0], results[1]) << plan::to_text(d) << " " << format;
    }
}

// From the second step on the head goes first; a rank that does without it then must not keep the others waiting, nor
// be kept.
TEST_P(Behind, ARankThatDoesWithoutItTakesPart) {
  const auto [transport, ranks] = GetParam();
  for (const plan::Degrees& d : plan::legal_chains(ranks)) {
    std::string results[2];
    for (const bool split : {false, true})
      run_ranks(transport, ranks, [&, d](comm::Group& world) {
        ByHand hand(split);
        Engine engine(hand.model, borrow(world), options(d.zero1, d.zero2, d.zero3), sgd());
        for (int step = 0; step < 4; ++step) {
          hand.loss(engine, 10 * step + world.rank(), step % 2 == 0 || world.rank() > 0).backward();
          engine.step(0.01f, 1);
        }
        std::vector<at::Tensor> all;
        for (const char* name : {"embedding", "head", "w0", "w1"}) all.push_back(whole_parameter(engine, name));
        const std::string got = bits(all);
        if (world.rank() == 0) results[split] = got;
      });
    EXPECT_EQ(results[0], results[1]) << plan::to_text(d);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Behind,
                         ::testing::Combine(::testing::Values(Transport::threads, Transport::peer, Transport::hosts,
                                                              Transport::gloo),
                                            ::testing::Values(2, 4)),
                         [](const auto& test) {
                           return name_of(std::get<0>(test.param)) + std::to_string(std::get<1>(test.param));
                         });

// In the trace: the first reduction of a backward pass.
TEST(BehindOrder, TheHeadIsReducedFirstFromTheSecondStepOn) {
  run_ranks(Transport::peer, 2, [](comm::Group& world) {
    ByHand hand(/*split=*/true);
    Engine engine(hand.model, borrow(world), options(2, 2, 2), adamw());
    std::vector<std::string> first;
    for (int step = 0; step < 3; ++step) {
      const auto trace = std::make_shared<Trace>([] { return int64_t{0}; });
      engine.record_into(trace);
      hand.loss(engine, 10 * step + world.rank()).backward();
      engine.record_into(nullptr);
      for (const TraceSpan& span : trace->spans())
        if (span.name.starts_with("reduce ")) {
          first.push_back(span.name);
          break;
        }
      engine.step(0.1f, 1);
    }
    EXPECT_EQ(first, (std::vector<std::string>{"reduce block1", "reduce (behind)", "reduce (behind)"}));
  });
}

}  // namespace
}  // namespace dovetail
