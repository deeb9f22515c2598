// Update operations on assembled units: who owns what, what moves, and that no cut shows (design
// sections 1, 7, 9).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <set>

#include "dovetail/base/error.h"
#include "dovetail/plan/degrees.h"
#include "tests/engine/units.h"
#include "tests/state_digest.h"

namespace dovetail {
namespace {

using namespace testing;
using ::testing::HasSubstr;

// The design's worked example: Wo 24 elements, Wq two heads of 4 x 4, b 8 elements at offsets 0,
// 24, 56.
struct Example : torch::nn::Module {
  Example() {
    wo = register_parameter("wo", at::ones({24}));
    wq = register_parameter("wq", at::ones({8, 4}));
    b = register_parameter("b", at::ones({8}));
  }
  at::Tensor forward(at::Tensor x) { return (wq.matmul(x).sum(1) * b).sum() + (wo * wo).sum(); }
  at::Tensor wo, wq, b;
};

EngineOptions example_options() {
  EngineOptions o = options(4, 2, 2);
  o.plan.alignment = 8;
  o.plan.boundary = plan::Boundary::any;  // else the planner finds an order that cuts no head
  o.hints = {{.name = "wq", .shape = {8, 4}, .heads = 2}};
  return o;
}

UpdateOps example_muon() {
  OptimizerOptions o{.name = "muon"};
  o.muon.unit = "head";
  return make_optimizer(o, {});
}

TEST(Units, TheWorkedExampleMovesWhatTheDesignSays) {
  run_ranks(Transport::threads, 4, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Example>>();
    initialise(*model, 1);
    Engine engine(model, borrow(world), example_options(), example_muon());
    const SegmentLayout& layout = engine.plan().groups[0].buckets[0].segments[0];
    ASSERT_EQ(layout.size(), 64);
    ASSERT_EQ(layout.shard1, 16);
    std::map<std::string, int64_t> offset;
    for (const Placement& p : layout.placements)
      offset[engine.plan().tensors[p.tensor].name] = p.offset;
    EXPECT_EQ(offset, (std::map<std::string, int64_t>{{"wo", 0}, {"wq", 24}, {"b", 56}}));

    const comm::Counts before = world.counters().read();
    model->forward(batch(world.rank(), {4, 3})).backward();
    engine.step(0.1f, 0.25);
    const comm::PhaseCount moved = (world.counters().read() - before).of(comm::Phase::fragment);
    // Head0 lies on ranks 2 and 1, its owner is rank 2; Head1 on ranks 1 and 3, its owner is
    // rank 1. Eight elements travel to the owner and eight back, as bf16.
    const int64_t head = 8 * 2;
    const int64_t sent[] = {0, head + head, head, head}, received[] = {0, head + head, head, head};
    EXPECT_EQ(moved.sent, sent[world.rank()]);
    EXPECT_EQ(moved.received, received[world.rank()]);
    std::map<std::string, int64_t> by_field;
    if (world.rank() != 0) by_field["grad"] = sent[world.rank()];
    EXPECT_EQ(engine.fragment_bytes_sent(), by_field);
    EXPECT_EQ(engine.predicted_fragment_bytes(), by_field);
    EXPECT_THAT(engine.owner_report(), HasSubstr("wq unit 0: owner 2, fragments 2:8 1:8\n"));
    EXPECT_THAT(engine.owner_report(), HasSubstr("wq unit 1: owner 1, fragments 1:8 3:8\n"));
    EXPECT_EQ(engine.held(), engine.predicted_held());
  });
}

struct Outcome {
  std::vector<std::string> weights;
  std::map<std::string, std::pair<size_t, uint64_t>> state;
  std::vector<double> norms;
  bool operator==(const Outcome&) const = default;
};

enum class Source { backward, injected };

Outcome train(Transport transport, int ranks, const plan::Degrees& d, const std::string& name,
              Source source, const std::string& format = "fp32",
              const std::function<void(EngineOptions&)>& change = {}) {
  Outcome result;
  std::mutex mutex;
  run_ranks(transport, ranks, [&](comm::Group& world) {
    auto zoo = make_zoo();
    EngineOptions o = options(d.zero1, d.zero2, d.zero3, format);
    o.hints = zoo_hints();
    o.norm.max_norm = 1;
    if (change) change(o);
    Engine engine(zoo, borrow(world), o, optimizer(name, zoo_hints()));
    Outcome mine;
    const comm::Counts before = world.counters().read();
    for (int step = 0; step < 4; ++step) {
      if (source == Source::backward) {
        zoo->forward(batch(step * ranks + world.rank(), {64}))
            .to(at::kFloat)
            .pow(2)
            .sum()
            .backward();
      } else {
        std::vector<at::Tensor> gradients;
        for (const TensorSpec& t : engine.plan().tensors) gradients.push_back(batch(step, t.shape));
        engine.inject_gradients(gradients);
      }
      mine.norms.push_back(engine.step(0.02f, 1.0 / ranks).grad_norm);
    }
    int64_t sent = 0;
    std::map<std::string, int64_t> predicted = engine.predicted_fragment_bytes();
    for (auto& [field, bytes] : predicted) bytes *= 4, sent += bytes;
    EXPECT_EQ(engine.fragment_bytes_sent(), predicted);
    EXPECT_EQ((world.counters().read() - before).of(comm::Phase::fragment).sent, sent);
    EXPECT_EQ(engine.held(), engine.predicted_held());
    mine.state = state_digest(engine.state(), world);
    for (const at::Tensor& t : whole_parameters(engine)) {
      mine.weights.push_back(bits({t}));
      EXPECT_TRUE(t.isfinite().all().item<bool>());
    }
    std::lock_guard lock(mutex);
    if (result.weights.empty()) result = mine;
    EXPECT_EQ(result, mine);
  });
  return result;
}

class Operations : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(Operations, EveryLegalChainGivesTheSameBits) {
  const auto [name, ranks] = GetParam();
  const Outcome first = train(Transport::threads, ranks, {1, 1, 1}, name, Source::backward);
  for (const plan::Degrees& d : plan::legal_chains(ranks))
    EXPECT_EQ(first, train(Transport::threads, ranks, d, name, Source::backward))
        << plan::to_text(d);
}

TEST_P(Operations, InjectedGradientsGiveTheBitsOfOneRank) {
  const auto [name, ranks] = GetParam();
  const Outcome one = train(Transport::threads, 1, {1, 1, 1}, name, Source::injected);
  for (const plan::Degrees& d : plan::legal_chains(ranks))
    EXPECT_EQ(one, train(Transport::threads, ranks, d, name, Source::injected)) << plan::to_text(d);
}

INSTANTIATE_TEST_SUITE_P(All, Operations,
                         ::testing::Combine(::testing::ValuesIn(optimizer_names()),
                                            ::testing::Values(2, 4, 8)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

TEST(Units, OddWorldsBf16AndGlooAreNoExceptions) {
  for (const std::string name : {"muon_head", "shampoo", "adam8", "mixed"}) {
    const Outcome one = train(Transport::threads, 1, {1, 1, 1}, name, Source::injected);
    EXPECT_EQ(train(Transport::threads, 3, {1, 1, 1}, name, Source::backward),
              train(Transport::threads, 3, {3, 3, 3}, name, Source::backward))
        << name;
    EXPECT_EQ(one.weights, train(Transport::gloo, 4, {4, 2, 2}, name, Source::injected).weights)
        << name;
    const Outcome half = train(Transport::threads, 4, {1, 1, 1}, name, Source::backward, "bf16");
    EXPECT_EQ(half, train(Transport::gloo, 4, {4, 4, 4}, name, Source::backward, "bf16")) << name;
    EXPECT_EQ(half, train(Transport::threads, 4, {4, 2, 1}, name, Source::backward, "bf16"))
        << name;
  }
}

TEST(Units, BoundariesOnUnitsPadInsteadOfMoving) {
  const Outcome plain = train(Transport::threads, 4, {4, 4, 4}, "muon", Source::backward);
  const Outcome padded = train(Transport::threads, 4, {4, 4, 4}, "muon", Source::backward, "fp32",
                               [](EngineOptions& o) { o.plan.boundary = plan::Boundary::unit; });
  EXPECT_EQ(plain, padded);
  run_ranks(Transport::threads, 4, [&](comm::Group& world) {
    EngineOptions o = options(4, 4, 4);
    o.hints = zoo_hints();
    o.plan.boundary = plan::Boundary::any;
    EXPECT_THAT(Engine(make_zoo(), borrow(world), o, optimizer("muon", zoo_hints())).owner_report(),
                ::testing::ContainsRegex("fragments [0-9]+:[0-9]+ "));
    o.plan.boundary = plan::Boundary::unit;
    Engine engine(make_zoo(), borrow(world), o, optimizer("muon", zoo_hints()));
    // Units may still move as a whole, to balance the work.
    EXPECT_THAT(engine.owner_report(), ::testing::Not(::testing::ContainsRegex("fragments [0-9]+:[0-9]+ ")));
  });
}

// Notes where the fields of its units lie.
struct Watcher final : UpdateOp {
  std::string_view name() const override { return "watcher"; }
  bool applies_to(const TensorSpec&) const override { return true; }
  Unit unit(const TensorSpec& t) const override {
    return t.heads > 0 ? Unit::of_node("head") : Unit{};
  }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{"grad", Access::read}, {"weight", Access::read_write}};
  }
  std::vector<StateField> state(const TensorSpec&) const override { return {}; }
  double cost(const TensorSpec&, const UnitPlace&) const override { return 1; }
  void run(const UnitView& v, const StepContext&) const override {
    if (v.unit >= 0)
      seen[v.tensor->name].push_back(
          {v.field("grad").f32(), v.field("weight").f32(), v.place, v.row_stride});
  }
  std::string describe() const override { return "watcher"; }
  struct Seen {
    const float *grad, *weight;
    UnitPlace place;
    int64_t stride;
  };
  mutable std::map<std::string, std::vector<Seen>> seen;
};

TEST(Units, WholeHeadsAreViewsOfTheOneAllocation) {
  auto zoo = make_zoo();
  run_ranks(Transport::threads, 1, [&](comm::Group& world) {
    auto watcher = std::make_shared<Watcher>();
    EngineOptions o = options(1, 1, 1);
    o.hints = zoo_hints();
    Engine engine(zoo, borrow(world), o, {watcher});
    zoo->forward(batch(0, {64})).sum().backward();
    engine.step(0.1f, 1);
    EXPECT_EQ(engine.held().staging, 0);
    EXPECT_EQ(engine.held().workspace, 0);
    for (const UpdateParameter& p : engine.parameters()) {
      if (p.spec->heads == 0) continue;
      const auto& seen = watcher->seen.at(p.spec->name);
      ASSERT_EQ(std::ssize(seen), p.spec->heads);
      for (const Watcher::Seen& s : seen) {
        EXPECT_EQ(s.weight, p.main.data_ptr<float>() + s.place.first);
        EXPECT_EQ(s.grad, p.grad.data_ptr<float>() + s.place.first);
        EXPECT_EQ(s.stride, 16);
      }
    }
    EXPECT_EQ(watcher->seen.at("block0.o")[1].place, (UnitPlace{4, 16, 4, 16}));
    EXPECT_EQ(watcher->seen.at("block0.qkv")[1].place, (UnitPlace{64, 4, 16, 16}));
  });
}

TEST(Units, ReplicasShareUnitsThatCostMoreThanTheirResult) {
  // Muon of a 70 x 64 matrix is dear, the watcher's heads are cheap: the one is shared, the others
  // are repeated.
  run_ranks(Transport::threads, 2, [&](comm::Group& world) {
    EngineOptions o = options(1, 1, 1);
    o.hints = zoo_hints();
    Engine muon(make_zoo(), borrow(world), o, optimizer("muon", zoo_hints()));
    EXPECT_GT(muon.predicted_fragment_bytes()["grad"], 0);
    Engine cheap(make_zoo(), borrow(world), o, {std::make_shared<Watcher>()});
    EXPECT_TRUE(cheap.predicted_fragment_bytes().empty());
  });
}

TEST(Units, AStepWithoutAFiniteNormChangesNothing) {
  for (const std::string name : {"muon", "shampoo", "adam8"})
    run_ranks(Transport::threads, 2, [&](comm::Group& world) {
      auto zoo = make_zoo();
      EngineOptions o = options(2, 2, 2);
      o.hints = zoo_hints();
      o.norm.kind = NormKind::infinity;
      Engine engine(zoo, borrow(world), o, optimizer(name, zoo_hints()));
      auto inject = [&](float value) {
        std::vector<at::Tensor> gradients;
        for (const TensorSpec& t : engine.plan().tensors) gradients.push_back(at::ones(t.shape));
        if (world.rank() == 0) gradients[1].view({-1})[3] = value;
        engine.inject_gradients(gradients);
        return engine.step(0.1f, 0.5);
      };
      EXPECT_EQ(inject(5).grad_norm, 3);  // the largest of (1 + 1) / 2 and (5 + 1) / 2
      const auto before = state_digest(engine.state(), world);
      for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        const StepResult r = inject(bad);
        EXPECT_TRUE(r.skipped);
        EXPECT_FALSE(std::isfinite(r.grad_norm));
        EXPECT_EQ(before, state_digest(engine.state(), world));
        EXPECT_EQ(engine.steps_done(), 1);
      }
    });
}

TEST(Units, AFrozenParameterKeepsItsUnitsAndState) {
  run_ranks(Transport::threads, 2, [&](comm::Group& world) {
    auto zoo = make_zoo();
    EngineOptions o = options(2, 2, 2);
    o.hints = zoo_hints();
    Engine engine(zoo, borrow(world), o, optimizer("muon_head", zoo_hints()));
    auto& frozen = zoo->blocks[0]->parameters_in_order[0];
    frozen.set_requires_grad(false);
    const std::string before = bits({whole_parameter(engine, "block0.qkv")});
    zoo->forward(batch(world.rank(), {64})).sum().backward();
    engine.step(0.1f, 0.5);
    EXPECT_EQ(before, bits({whole_parameter(engine, "block0.qkv")}));
    frozen.set_requires_grad(true);
    zoo->forward(batch(world.rank(), {64})).sum().backward();
    engine.step(0.1f, 0.5);
    EXPECT_NE(before, bits({whole_parameter(engine, "block0.qkv")}));
  });
}

// Case B14: what is 8-bit, and where its blocks lie, follows from the global tensor.
TEST(Units, EightBitStateIsTheSameAtEveryRankCount) {
  const std::vector<ZooSpec> specs{{"a", {6, 1024}}, {"b", {3, 1024}}, {"c", {4100}}, {"d", {1, 4096}}};
  std::map<std::string, std::pair<size_t, uint64_t>> state;
  std::string weights;
  for (int ranks : {1, 2, 3, 4})
    for (const plan::Degrees& d : plan::legal_chains(ranks))
      run_ranks(Transport::threads, ranks, [&](comm::Group& world) {
        auto model = std::make_shared<ops::Unit<ZooBlock>>(specs);
        initialise(*model, 3);
        Engine engine(model, borrow(world), options(d.zero1, d.zero2, d.zero3), optimizer("adam8", {}));
        for (int step = 0; step < 2; ++step) {
          std::vector<at::Tensor> gradients;  // of rank 0 alone, so that the sum is exact
          for (const TensorSpec& t : engine.plan().tensors)
            gradients.push_back(batch(step, t.shape) * (world.rank() == 0 ? 1 : 0));
          engine.inject_gradients(gradients);
          engine.step(0.01f, 1);
        }
        std::set<std::string> eight, full;
        for (const StateEntry& e : engine.state()) {
          if (e.field == "exp_avg_code") eight.insert(e.tensor);
          if (e.field == "exp_avg") full.insert(e.tensor);
          if (e.field == "exp_avg_scale") {
            EXPECT_EQ(e.shape, (std::vector<int64_t>{e.tensor == "a" ? 24 : e.tensor == "c" ? 17 : 16}));
          }
        }
        EXPECT_EQ(eight, (std::set<std::string>{"a", "c", "d"}));
        EXPECT_EQ(full, (std::set<std::string>{"b"}));
        const auto mine = state_digest(engine.state(), world);
        const std::string whole = bits(whole_parameters(engine));
        if (world.rank() != 0) return;
        if (state.empty()) state = mine, weights = whole;
        EXPECT_EQ(state, mine) << ranks << " ranks, " << plan::to_text(d);
        EXPECT_EQ(weights, whole) << ranks << " ranks, " << plan::to_text(d);
      });
}

TEST(Units, RanksWithOtherOptimizersAreTold) {
  try {
    run_ranks(Transport::threads, 2, [&](comm::Group& world) {
      EngineOptions o = options(2, 2, 2);
      o.hints = zoo_hints();
      Engine engine(make_zoo(), borrow(world), o,
                    optimizer(world.rank() == 0 ? "muon" : "muon_head", zoo_hints()));
    });
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), ::testing::AllOf(HasSubstr("unit=matrix"), HasSubstr("unit=head")));
  }
}

}  // namespace
}  // namespace dovetail
