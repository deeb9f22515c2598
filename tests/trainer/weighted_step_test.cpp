// Case B12: how tokens are spread over ranks and micro-batches never shows.
#include "dovetail/trainer/weighted_step.h"

#include <ATen/ops/full.h>
#include <ATen/ops/item.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "dovetail/base/error.h"
#include "dovetail/comm/threads/spawn.h"
#include "dovetail/ops/unit.h"
#include "dovetail/update/optimizer.h"

namespace dovetail::trainer {
namespace {

using ::testing::HasSubstr;

// A token with per-token gradient g has the loss weight * g.
struct ScalarBlock : torch::nn::Module {
  explicit ScalarBlock(float value) : weight(register_parameter("weight", at::full({}, value))) {}
  at::Tensor forward(at::Tensor g) { return (weight * g).sum(); }
  at::Tensor weight;
};
using Scalar = ops::Unit<ScalarBlock>;

using Tokens = std::vector<float>;  // gradients of the unmasked tokens of a micro-batch
using Spread = std::vector<std::vector<Tokens>>;  // [rank][micro-batch]

struct Outcome {
  std::vector<StepReport> reports;  // per rank
  std::vector<float> weights;       // per rank, after the step
  std::vector<int64_t> steps_done;
};

// Steps of plain SGD with learning rate 1 on a weight that starts at `start`.
Outcome run_steps(const std::vector<Spread>& steps, float start) {
  const int ranks = static_cast<int>(steps[0].size());
  Outcome out{std::vector<StepReport>(ranks), std::vector<float>(ranks),
              std::vector<int64_t>(ranks)};
  comm::spawn(ranks, [&](comm::Group& group) {
    const std::shared_ptr<comm::Group> world(&group, [](comm::Group*) {});
    const int rank = group.rank();
    auto model = std::make_shared<Scalar>(start);
    EngineOptions options;
    options.plan.degrees = {ranks, ranks, ranks};
    Engine engine(model, world, options, make_optimizer({.name = "sgd"}, {}));
    for (const Spread& spread : steps) {
      const auto& mine = spread[static_cast<size_t>(rank)];
      WeightedStep step;
      step.micro_batches = static_cast<int64_t>(mine.size());
      step.lr = 1;
      step.forward = [&](int64_t a) {
        const Tokens& tokens = mine[static_cast<size_t>(a)];
        return MicroLoss{model->forward(at::tensor(tokens)), static_cast<int64_t>(tokens.size())};
      };
      out.reports[rank] = run_step(engine, *world, step);
    }
    out.weights[rank] = engine.whole_parameter(0).item<float>();
    out.steps_done[rank] = engine.steps_done();
  });
  return out;
}

Outcome run_once(const Spread& spread, float start) { return run_steps({spread}, start); }

void expect_the_weighted_mean(const Spread& spread) {
  const Outcome out = run_once(spread, 2.0f);
  for (size_t rank = 0; rank < spread.size(); ++rank) {
    const StepReport& report = out.reports[rank];
    EXPECT_EQ(report.outcome, StepOutcome::updated);
    EXPECT_EQ(report.tokens, 5);
    EXPECT_FLOAT_EQ(static_cast<float>(report.loss), 7.2f);  // 2 * 3.6
    EXPECT_FLOAT_EQ(static_cast<float>(report.grad_norm), 3.6f);
    EXPECT_FLOAT_EQ(out.weights[rank], 2.0f - 3.6f);
    EXPECT_EQ(out.steps_done[rank], 1);
  }
}

TEST(WeightedStep, TwoRanksTwoMicroBatchesOneOfThemMasked) {
  expect_the_weighted_mean({{{1}, {2}}, {{5, 5, 5}, {}}});
}

TEST(WeightedStep, AnySplitGivesTheSame) {
  const Tokens tokens{1, 2, 5, 5, 5};
  for (const size_t ranks : {1, 2, 4})
    for (const size_t micro_batches : {1, 2}) {
      Spread spread(ranks, std::vector<Tokens>(micro_batches));
      for (size_t i = 0; i < tokens.size(); ++i) {
        const size_t chunk = std::min(i, ranks * micro_batches - 1);
        spread[chunk % ranks][chunk / ranks].push_back(tokens[i]);
      }
      SCOPED_TRACE(fmt::format("{} ranks, {} micro-batches", ranks, micro_batches));
      expect_the_weighted_mean(spread);
    }
}

TEST(WeightedStep, EverythingMaskedIsSkippedAndReported) {
  for (const size_t ranks : {1, 2}) {
    const Spread masked(ranks, std::vector<Tokens>(2));
    Outcome out = run_once(masked, 2.0f);
    for (size_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(out.reports[rank].outcome, StepOutcome::no_tokens);
      EXPECT_TRUE(std::isnan(out.reports[rank].loss));
      EXPECT_EQ(out.weights[rank], 2.0f);
      EXPECT_EQ(out.steps_done[rank], 0);
    }
    // And the next step is as if it had not been.
    Spread next(ranks, std::vector<Tokens>(1));
    next[ranks - 1][0] = {3, 5};
    out = run_steps({masked, next}, 2.0f);
    EXPECT_FLOAT_EQ(out.weights[0], -2.0f);
    EXPECT_EQ(out.steps_done[0], 1);
  }
}

TEST(WeightedStep, ALossThatIsNotFiniteOnOneRankStopsAll) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Outcome out = run_steps({{{{1}, {2}}, {{5}, {nan}}}}, 2.0f);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(out.reports[rank].outcome, StepOutcome::non_finite_loss);
    EXPECT_EQ(out.reports[rank].bad_rank, 1);
    EXPECT_EQ(out.weights[rank], 2.0f);
  }
  // Its gradients are gone: the next step has the right one.
  const Outcome after = run_steps({{{{1}}, {{nan}}}, {{{1}}, {{3}}}}, 2.0f);
  EXPECT_EQ(after.reports[0].outcome, StepOutcome::updated);
  EXPECT_FLOAT_EQ(after.weights[1], 0.0f);
}

TEST(WeightedStep, ANormThatIsNotFiniteChangesNothing) {
  const float huge = 3e38f;
  const Outcome out =
      run_once({{{huge}}, {{huge}}}, 1e-30f);  // losses are finite, the sum of gradients is not
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(out.reports[rank].outcome, StepOutcome::non_finite_norm);
    EXPECT_EQ(out.weights[rank], 1e-30f);
    EXPECT_EQ(out.steps_done[rank], 0);
  }
}

// Case B24: ranks with another number of micro-batches are an error on all, not a hang.
TEST(WeightedStep, AnotherNumberOfMicroBatchesIsAnError) {
  std::mutex mutex;
  std::vector<std::string> errors;
  const auto body = [&](comm::Group& group) {
    const std::shared_ptr<comm::Group> world(&group, [](comm::Group*) {});
    auto model = std::make_shared<Scalar>(1.0f);
    EngineOptions options;
    options.plan.degrees = {2, 2, 2};
    Engine engine(model, world, options, make_optimizer({.name = "sgd"}, {}));
    WeightedStep step;
    step.micro_batches = group.rank() == 0 ? 2 : 1;
    step.lr = 1;
    step.forward = [&](int64_t) { return MicroLoss{model->forward(at::ones({2})), 2}; };
    try {
      run_step(engine, *world, step);
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex);
      errors.emplace_back(e.what());
      throw;
    }
  };
  EXPECT_THROW(comm::spawn(2, body, std::chrono::seconds(8)), Error);
  ASSERT_EQ(errors.size(), 2u);
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("step 0"));
}

TEST(WeightedStep, OneWishToStopReachesAll) {
  std::vector<int> stop(4, -1);
  comm::spawn(4, [&](comm::Group& group) {
    const std::shared_ptr<comm::Group> world(&group, [](comm::Group*) {});
    auto model = std::make_shared<Scalar>(1.0f);
    EngineOptions options;
    options.plan.degrees = {4, 4, 4};
    Engine engine(model, world, options, make_optimizer({.name = "sgd"}, {}));
    WeightedStep step;
    step.lr = 1;
    step.forward = [&](int64_t) { return MicroLoss{model->forward(at::ones({2})), 2}; };
    step.wants_to_stop = [&] { return group.rank() == 2; };
    stop[static_cast<size_t>(group.rank())] = run_step(engine, *world, step).stop;
  });
  EXPECT_EQ(stop, std::vector<int>(4, 1));
}

}  // namespace
}  // namespace dovetail::trainer
