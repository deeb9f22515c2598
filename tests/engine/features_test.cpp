// What modules and users do: shared and unused modules, outputs in any structure, evaluation, failures, misuse.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dovetail/base/error.h"
#include "dovetail/comm/threads/spawn.h"
#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;
using torch::nn::Module;
using LinearUnit = ops::Unit<ops::Linear>;

std::shared_ptr<LinearUnit> linear(int64_t in, int64_t out) { return std::make_shared<LinearUnit>(in, out); }

// Sum of gradients over `ranks` passes of a model without an engine against that with one, every chain.
template <class Model, class Loss>
void expect_same(const std::function<std::shared_ptr<Model>()>& make, Loss loss, int ranks = 2,
                 const std::function<void(EngineOptions&)>& change = [](EngineOptions&) {}) {
  auto plain = make();
  for (int r = 0; r < ranks; ++r) loss(*plain, r).backward();
  for (const plan::Degrees& d : plan::legal_chains(ranks)) {
    comm::spawn(ranks, [&, d](comm::Group& world) {
      auto model = make();
      EngineOptions o = options(d.zero1, d.zero2, d.zero3);
      change(o);
      Engine engine(model, borrow(world), o, sgd());
      loss(*model, world.rank()).backward();
      for (const auto& p : plain->named_parameters()) {
        if (p.value().numel() == 0) continue;
        const at::Tensor got = whole_gradient(engine, p.key());
        const at::Tensor want = p.value().grad().defined() ? p.value().grad() : at::zeros_like(got);
        EXPECT_TRUE(at::allclose(got, want, 1e-5, 1e-6)) << p.key() << " with degrees " << plan::to_text(d);
      }
      engine.step(0.1f, 1);
    });
  }
}

struct Twice : Module {
  Twice() {
    shared = register_module("shared", linear(4, 4));
    last = register_module("last", linear(4, 2));
    initialise(*this, 11);
  }
  at::Tensor forward(at::Tensor x) { return last->forward(shared->forward(at::tanh(shared->forward(x)))); }
  std::shared_ptr<LinearUnit> shared, last;
};

TEST(Features, ModuleUsedTwiceInOneForward) {
  auto loss = [](auto& m, int r) { return m.forward(batch(r, {3, 4})).pow(2).sum(); };
  auto make = [] { return std::make_shared<ops::Unit<Twice>>(); };
  expect_same<ops::Unit<Twice>>(make, loss, 2);
  expect_same<ops::Unit<Twice>>(make, loss, 2, [](EngineOptions& o) { o.recompute = true; });
  expect_same<ops::Unit<Twice>>(make, loss, 4);
}

TEST(Features, TwoForwardsBeforeTheirBackwards) {
  comm::spawn(2, [&](comm::Group& world) {
    auto a = make_net(), b = make_net();
    Engine first(a, borrow(world), options(2, 2, 2), sgd()), second(b, borrow(world), options(2, 2, 2), sgd());
    at::Tensor l0 = a->forward(batch(world.rank(), {2, 5})).sum(), l1 = a->forward(batch(7, {2, 5})).sum();
    l0.backward();
    l1.backward();
    b->forward(batch(world.rank(), {2, 5})).sum().backward();
    b->forward(batch(7, {2, 5})).sum().backward();
    for (int64_t i = 0; i < std::ssize(first.plan().tensors); ++i)
      EXPECT_TRUE(first.whole_gradient(i).equal(second.whole_gradient(i))) << i;
  });
}

TEST(Features, GatherAllAfterParametersWereHandedOut) {
  comm::spawn(2, [&](comm::Group& world) {
    auto net = make_net();
    Engine engine(net, borrow(world), options(2, 2, 2), sgd());
    const at::Tensor x = batch(3, {2, 5});
    at::NoGradGuard no_grad;
    const at::Tensor before = net->forward(x);
    for (UpdateParameter& p : engine.parameters()) p.main.mul_(1);
    engine.gather_all();
    EXPECT_TRUE(net->forward(x).equal(before));
    for (UpdateParameter& p : engine.parameters()) p.main.mul_(0.5);
    auto halved = make_net();
    for (auto& p : halved->parameters()) p.mul_(0.5);
    EXPECT_TRUE(net->forward(x).equal(halved->forward(x))) << "what was written while all was gathered counts";
    engine.release_all();
  });
}

struct Output {
  std::map<std::string, std::vector<at::Tensor>> named;
  std::optional<std::tuple<at::Tensor, int>> extra;
};
template <class F>
void visit_members(Output& o, F&& f) {
  f(o.named);
  f(o.extra);
}
struct Deep : Module {
  Deep() { l = register_module("l", std::make_shared<ops::Linear>(4, 4)); }
  Output forward(std::vector<at::Tensor> xs) {
    Output o;
    for (auto& x : xs) o.named["all"].push_back(l->forward(x));
    o.extra = std::tuple{l->forward(xs[0]), 3};
    return o;
  }
  std::shared_ptr<ops::Linear> l;
};
// What no visitor can see into.
struct Opaque {
  at::Tensor hidden;
};
struct Hiding : Module {
  Hiding() { l = register_module("l", std::make_shared<ops::Linear>(4, 4)); }
  Opaque forward(at::Tensor x) { return {at::tanh(l->forward(x))}; }
  std::shared_ptr<ops::Linear> l;
};
struct Structures : Module {
  explicit Structures(bool hide) : hide(hide) {
    first = register_module("first", linear(4, 4));
    deep = register_module("deep", std::make_shared<ops::Unit<Deep>>());
    hiding = register_module("hiding", std::make_shared<ops::Unit<Hiding>>());
    last = register_module("last", linear(4, 4));
    initialise(*this, 12);
  }
  at::Tensor forward(at::Tensor x) {
    x = first->forward(x);
    Output o = deep->forward(std::vector<at::Tensor>{x, 2 * x});
    x = o.named.at("all")[0] + o.named.at("all")[1] * std::get<0>(*o.extra);
    if (hide) x = hiding->forward(x).hidden;
    return last->forward(x);
  }
  bool hide;
  std::shared_ptr<LinearUnit> first, last;
  std::shared_ptr<ops::Unit<Deep>> deep;
  std::shared_ptr<ops::Unit<Hiding>> hiding;
};

TEST(Features, OutputsInAnyStructure) {
  expect_same<ops::Unit<Structures>>([] { return std::make_shared<ops::Unit<Structures>>(false); },
                                     [](auto& m, int r) { return m.forward(batch(r, {3, 4})).pow(2).sum(); });
}

TEST(Features, AnOutputThatHidesItsTensorsIsAnErrorThatNamesTheUnit) {
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Structures>>(true);
    EngineOptions o = options(2, 2, 2);
    o.plan.prefetch = 0;
    Engine engine(model, borrow(world), o, sgd());
    try {
      model->forward(batch(world.rank(), {3, 4})).sum().backward();
      FAIL() << "hidden outputs were not noticed";
    } catch (const std::exception& e) {
      EXPECT_NE(std::string(e.what()).find("hiding"), std::string::npos) << e.what();
    }
  });
}

TEST(Features, UnusedParametersStayAsTheyAre) {
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Structures>>(false);  // never runs `hiding`
    Engine engine(model, borrow(world), options(2, 2, 2), adamw());
    const at::Tensor before = whole_parameter(engine, "hiding.l.weight");
    for (int i = 0; i < 3; ++i) {
      model->forward(batch(world.rank(), {3, 4})).sum().backward();
      engine.step(0.1f, 1);
    }
    EXPECT_TRUE(whole_parameter(engine, "hiding.l.weight").equal(before));
    EXPECT_FALSE(whole_parameter(engine, "first.weight").equal(model->last->bias));
  });
}

// Only rank 1's loss depends on the second unit: its gradient is that rank's, and nothing hangs.
struct Branch : Module {
  Branch() {
    a = register_module("a", linear(4, 4));
    b = register_module("b", linear(4, 4));
    c = register_module("c", linear(4, 4));
    initialise(*this, 13);
  }
  at::Tensor forward(at::Tensor x, bool use) {
    x = a->forward(x);
    at::Tensor y = b->forward(x);
    return c->forward(use ? x + y : x);
  }
  std::shared_ptr<LinearUnit> a, b, c;
};

TEST(Features, AUnitThatOneRankDidNotUseIsReducedAllTheSame) {
  for (int prefetch : {0, 1, 2})
    expect_same<ops::Unit<Branch>>([] { return std::make_shared<ops::Unit<Branch>>(); },
                                   [](auto& m, int r) { return m.forward(batch(r, {3, 4}), r == 1).pow(2).sum(); }, 2,
                                   [&](EngineOptions& o) { o.plan.prefetch = prefetch; });
}

TEST(Features, EvaluationChangesNothingAndReleasesAll) {
  comm::spawn(2, [&](comm::Group& world) {
    auto net = make_net();
    Engine engine(net, borrow(world), options(2, 2, 2), sgd());
    at::Tensor with_grad = net->forward(batch(0, {2, 5})).detach().clone();
    at::NoGradGuard no_grad;
    EXPECT_TRUE(net->forward(batch(0, {2, 5})).equal(with_grad));
    EXPECT_ANY_THROW(net->in.sum());
    engine.gather_all();
    const int64_t before = world.counters().read().sent();
    EXPECT_TRUE(net->forward(batch(0, {2, 5})).equal(with_grad));
    EXPECT_EQ(world.counters().read().sent(), before);
    engine.release_all();
    EXPECT_ANY_THROW(net->in.sum());
    EXPECT_EQ(engine.held(), engine.predicted_held());  // what all units at once took is given back
  });
}

TEST(Features, WritesToMainWeightsReachTheNextForward) {
  for (const plan::Degrees& d : plan::legal_chains(4))
    for (const std::string format : {"fp32", "bf16"})
      comm::spawn(4, [&, d](comm::Group& world) {
        auto net = make_net();
        Engine engine(net, borrow(world), options(d.zero1, d.zero2, d.zero3, format), sgd());
        at::NoGradGuard no_grad;
        net->forward(batch(0, {2, 5}));
        for (UpdateParameter& p : engine.parameters()) p.main.fill_(p.spec->name == "temperature" ? 2 : 0.5);
        const at::Tensor y = net->forward(at::ones({1, 5}));
        auto fresh = std::make_shared<ops::Unit<Net>>(5, 6, 7, 3);
        for (auto& p : fresh->parameters()) p.fill_(0.5);
        fresh->temperature.fill_(2);
        if (format == "bf16") fresh->to(at::kBFloat16);
        EXPECT_TRUE(y.equal(fresh->forward(at::ones({1, 5}, y.scalar_type())))) << plan::to_text(d);
      });
}

struct Throwing : Module {
  Throwing() { l = register_module("l", linear(4, 4)); }
  at::Tensor forward(at::Tensor x) {
    x = l->forward(x);
    if (fail) throw std::runtime_error("as asked");
    return x;
  }
  bool fail = false;
  std::shared_ptr<LinearUnit> l;
};

TEST(Features, AForwardThatThrowsCanBeRepeated) {
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Throwing>>();
    initialise(*model, 1);
    Engine engine(model, borrow(world), options(2, 2, 2), sgd());
    model->fail = true;
    EXPECT_THROW(model->forward(batch(0, {2, 4})), std::runtime_error);
    model->fail = false;
    model->forward(batch(0, {2, 4})).sum().backward();
    EXPECT_FALSE(engine.step(0.1f, 1).skipped);
  });
}

TEST(Features, NonFiniteGradientsSkipTheStepEverywhere) {
  comm::spawn(2, [&](comm::Group& world) {
    auto net = make_net();
    Engine engine(net, borrow(world), options(2, 2, 2), adamw());
    const std::string before = bits(whole_parameters(engine));
    at::Tensor loss = net->forward(batch(0, {2, 5})).sum();
    if (world.rank() == 1) loss = loss * std::numeric_limits<double>::quiet_NaN();
    loss.backward();
    const StepResult r = engine.step(0.1f, 1);
    EXPECT_TRUE(r.skipped);
    EXPECT_TRUE(std::isnan(r.grad_norm));
    EXPECT_EQ(engine.steps_done(), 0);
    EXPECT_EQ(bits(whole_parameters(engine)), before);
    net->forward(batch(0, {2, 5})).sum().backward();
    EXPECT_FALSE(engine.step(0.1f, 1).skipped);
  });
}

// The norm is summed where gradients are reduced; what is written to them or frozen afterwards counts all the same.
TEST(Features, TheNormIsOfTheGradientsAsTheyAreAtTheStep) {
  auto norms = [](const std::function<void(Engine&, Net&)>& between) {
    double norm = 0;
    comm::spawn(2, [&](comm::Group& world) {
      auto net = make_net();
      Engine engine(net, borrow(world), options(2, 2, 2), adamw());
      net->forward(batch(world.rank(), {2, 5})).sum().backward();
      between(engine, *net);
      const double mine = engine.step(0.1f, 1).grad_norm;
      if (world.rank() == 0) norm = mine;
    });
    return norm;
  };
  const double plain = norms([](Engine&, Net&) {});
  EXPECT_GT(plain, 0);
  EXPECT_EQ(plain, norms([](Engine& engine, Net&) { engine.parameters(); }));
  EXPECT_EQ(2 * plain, norms([](Engine& engine, Net&) {
    for (UpdateParameter& p : engine.parameters()) p.grad.mul_(2);
  }));
  EXPECT_LT(norms([](Engine&, Net& net) { net.in.requires_grad_(false); }), plain);
}

template <class E>
void expect_error(const std::function<void()>& call, const std::vector<std::string>& words) {
  try {
    call();
    FAIL() << "no error";
  } catch (const E& e) {
    for (const std::string& w : words) EXPECT_NE(std::string(e.what()).find(w), std::string::npos) << e.what();
  }
}

TEST(Misuse, IsOneErrorThatNamesTheThing) {
  comm::spawn(2, [&](comm::Group& world) {
    auto net = make_net();
    auto build = [&](EngineOptions o, std::shared_ptr<Module> m) { Engine(m, borrow(world), o, sgd()); };
    expect_error<ConfigError>([&] { build(options(3, 1, 1), make_net()); }, {"3", "2"});
    expect_error<ConfigError>([&] { build(options(2, 1, 2), make_net()); }, {"2", "1"});
    expect_error<ConfigError>([&] { build(options(2, 2, 2, "fp8"), make_net()); }, {"fp8"});
    auto no_unit = std::make_shared<ops::Linear>(3, 3);
    expect_error<ConfigError>([&] { build(options(1, 1, 1), no_unit); }, {"weight", "Unit"});
    auto doubles = std::make_shared<LinearUnit>(3, 3);
    doubles->to(at::kDouble);
    expect_error<ConfigError>([&] { build(options(1, 1, 1), doubles); }, {"weight", "Double"});
    expect_error<ConfigError>([&] { build(options(2, 2, 2), make_net(1 + world.rank())); }, {"rank 0", "rank 1", "in"});
    expect_error<PlanError>([&] { build(options(2, 2, world.rank() ? 2 : 1), make_net()); }, {"plan", "line"});
    Engine engine(net, borrow(world), options(2, 2, 2), sgd());
    expect_error<ConfigError>([&] { engine.set_gradient_sync(false); }, {"local_accumulation"});
    expect_error<ConfigError>([&] { engine.inject_gradients({}); }, {"wanted", "got 0"});
    try {
      (void)net->blocks[1]->up->weight.sum();
      FAIL();
    } catch (const std::exception& e) {
      EXPECT_NE(std::string(e.what()).find("block1"), std::string::npos) << e.what();
    }
  });
}

TEST(Initial, BroadcastTakesRankZerosWeightsAndBuffers) {
  comm::spawn(4, [&](comm::Group& world) {
    auto net = make_net(1 + world.rank());
    EngineOptions o = options(4, 2, 1);
    o.initial = InitialWeights::broadcast_rank0;
    Engine engine(net, borrow(world), o, sgd());
    auto zero = make_net(1);
    std::vector<at::Tensor> want;
    const auto named = zero->named_parameters();
    for (const TensorSpec& t : engine.plan().tensors) want.push_back(named[t.name].detach());
    EXPECT_EQ(bits(whole_parameters(engine)), bits(want));
  });
}

}  // namespace
}  // namespace dovetail
