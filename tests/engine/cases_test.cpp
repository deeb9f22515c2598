// Faults that users of sharded trainers reported, by number, and what else of their kind must work.
// The reference is one process that sees all ranks' data with loss = mean of the ranks' losses,
// without an engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dovetail/base/error.h"
#include "dovetail/comm/threads/spawn.h"
#include "dovetail/update/optimizer.h"
#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;
using torch::nn::Module;

// Gradients of the mean loss over `ranks` batches, by parameter name, of a model no engine has touched.
template <class Model, class Loss>
std::map<std::string, at::Tensor> reference_gradients(Model& model, int ranks, Loss loss) {
  for (int r = 0; r < ranks; ++r) (loss(model, r) / ranks).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& p : model.named_parameters())
    if (p.value().grad().defined()) gradients[p.key()] = p.value().grad().clone();
  return gradients;
}

void expect_close(const at::Tensor& got, const at::Tensor& want, const std::string& what, double tolerance = 2e-6) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  if (got.numel() == 0) return;
  const double error = (got.to(at::kDouble) - want.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(error, tolerance * std::max(1.0, want.abs().max().item<double>())) << what << "\n" << got << want;
}

// Every parameter's gradient over `ranks` ranks equals the reference's, for the extreme chains and one between.
template <class Make, class Loss>
void expect_reference_gradients(Make make, Loss loss, std::vector<int> worlds = {1, 2, 4},
                                const EngineOptions& base = options(1, 1, 1)) {
  for (int ranks : worlds) {
    auto plain = make();
    const auto want = reference_gradients(*plain, ranks, loss);
    for (int64_t d : {1, 2, ranks}) {
      if (ranks % d) continue;
      comm::spawn(ranks, [&](comm::Group& world) {
        EngineOptions o = base;
        o.plan.degrees = {ranks, d, d};
        auto model = make();
        Engine engine(model, borrow(world), o, sgd());
        loss(*model, world.rank()).backward();
        for (const auto& [name, gradient] : want)
          expect_close(whole_gradient(engine, name) / ranks, gradient, name + " at " + std::to_string(ranks));
        EXPECT_FALSE(engine.step(0.1f, 1.0 / ranks).skipped);
      });
    }
  }
}

TEST(Reference, NetOfManyKindsOfParameters) {
  expect_reference_gradients([] { return make_net(); },
                             [](auto& net, int r) { return net.forward(batch(r, {4, 5})).pow(2).sum(); });
}

TEST(Reference, WithRecomputation) {
  EngineOptions o = options(1, 1, 1);
  o.recompute = true;
  expect_reference_gradients([] { return make_net(); },
                             [](auto& net, int r) { return net.forward(batch(r, {4, 5})).pow(2).sum(); }, {1, 2, 4}, o);
}

// B02.
struct Scaled : Module {
  Scaled() { s = register_parameter("s", at::full({}, 2.0)); }
  at::Tensor forward(at::Tensor x) { return x.sum() * s; }
  at::Tensor s;
};

TEST(B02, ZeroDimensionalParameter) {
  for (int ranks : {2, 4}) {
    comm::spawn(ranks, [&](comm::Group& world) {
      auto model = std::make_shared<ops::Unit<Scaled>>();
      Engine engine(model, borrow(world), options(ranks, ranks, ranks), sgd());
      const std::vector<float> x = world.rank() % 2 ? std::vector<float>{0, 3} : std::vector<float>{1, 0};
      model->forward(torch::tensor(x)).backward();
      EXPECT_EQ(engine.whole_gradient(0).item<float>() / ranks, 2.f);
      engine.step(0.5f, 1.0 / ranks);
      const at::Tensor s = engine.whole_parameter(0);
      EXPECT_EQ(s.dim(), 0);
      EXPECT_EQ(s.item<float>(), 1.f);
      const ShardedState state = engine.state();
      EXPECT_TRUE(state.at(0).shape.empty());
      const int64_t owned = state[0].elements.size();
      int64_t owners = 0;
      for (const auto& n : world.gather_bytes(std::as_bytes(std::span(&owned, 1)), {}))
        owners += *reinterpret_cast<const int64_t*>(n.data());
      EXPECT_EQ(owners, 1);
    });
  }
}

// B03.
struct Strided : Module {
  Strided() {
    linear = register_module("linear", std::make_shared<ops::Linear>(4, 6));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 2)));
    at::NoGradGuard no_grad;
    initialise(*this, 5);
    linear->weight.set_data(at::randn({4, 6}, at::detail::createCPUGenerator(7)).t());
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(at::Tensor x) {
    return conv->forward(linear->forward(x).view({2, 3, 2, 2})).pow(2).sum() + linear->forward(x).sum();
  }
  std::shared_ptr<ops::Linear> linear;
  torch::nn::Conv2d conv{nullptr};
};

TEST(B03, AnyStrideIsAccepted) {
  auto plain = std::make_shared<ops::Unit<Strided>>();
  ASSERT_FALSE(plain->linear->weight.is_contiguous());
  ASSERT_FALSE(plain->conv->weight.is_contiguous());
  expect_reference_gradients([] { return std::make_shared<ops::Unit<Strided>>(); },
                             [](auto& m, int r) { return m.forward(batch(r, {4, 4})); });
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Strided>>();
    Engine engine(model, borrow(world), options(2, 2, 2), sgd());
    EXPECT_TRUE(whole_parameter(engine, "linear.weight").equal(plain->linear->weight));
    EXPECT_TRUE(whole_parameter(engine, "conv.weight").equal(plain->conv->weight));
    // One step, in the logical order of elements, whatever the stride.
    auto reference = std::make_shared<ops::Unit<Strided>>();
    for (int r = 0; r < 2; ++r) reference->forward(batch(r, {4, 4})).pow(2).sum().backward();
    model->forward(batch(world.rank(), {4, 4})).pow(2).sum().backward();
    engine.step(0.1f, 0.5);
    for (const auto& p : reference->named_parameters())
      expect_close(whole_parameter(engine, p.key()), p.value() - 0.05 * p.value().grad(), p.key(), 1e-5);
    for (const StateEntry& e : engine.state())
      if (e.tensor == "linear.weight") {
        const at::Tensor logical = whole_parameter(engine, e.tensor).contiguous().view({-1});
        for (int64_t i = 0; i < e.elements.size(); ++i)
          EXPECT_EQ(reinterpret_cast<const float*>(e.data)[i], logical[e.elements.begin + i].item<float>());
      }
  });
}

// B06: the embedding's weight in unit A is the head's in unit C; the other order too.
struct Table : Module {
  explicit Table(at::Tensor w) { weight = register_parameter("weight", std::move(w)); }
  at::Tensor forward(at::Tensor tokens) { return weight.index_select(0, tokens); }
  at::Tensor weight;
};
struct Head : Module {
  explicit Head(at::Tensor w) { linear = register_module("linear", std::make_shared<ops::Linear>(w)); }
  at::Tensor forward(at::Tensor x) { return linear->forward(x); }
  std::shared_ptr<ops::Linear> linear;
};
template <bool HeadFirst>
struct Tied : Module {
  Tied() {
    at::Tensor w = at::randn({5, 4}, at::detail::createCPUGenerator(3)).set_requires_grad(true);
    auto add_head = [&] { c = register_module("c", std::make_shared<ops::Unit<Head>>(w)); };
    if (HeadFirst) add_head();
    a = register_module("a", std::make_shared<ops::Unit<Table>>(w));
    b = register_module("b", std::make_shared<ops::Unit<ops::Linear>>(4, 4));
    if (!HeadFirst) add_head();
    initialise(*b, 4);
  }
  at::Tensor forward(at::Tensor tokens) { return c->forward(b->forward(a->forward(tokens))); }
  std::shared_ptr<ops::Unit<Table>> a;
  std::shared_ptr<ops::Unit<ops::Linear>> b;
  std::shared_ptr<ops::Unit<Head>> c;
};

at::Tensor tokens_of(int rank) { return torch::tensor({rank % 5, (rank + 2) % 5, 3}); }

template <bool HeadFirst>
void check_tied() {
  using Model = ops::Unit<Tied<HeadFirst>>;
  auto loss = [](auto& m, int r) { return m.forward(tokens_of(r)).pow(2).sum(); };
  const std::string name = HeadFirst ? "c.linear.weight" : "a.weight";
  for (int ranks : {2, 4}) {
    auto plain = std::make_shared<Model>();
    const auto want = reference_gradients(*plain, ranks, loss);
    // parameters() lists the tied one twice
    std::vector<at::Tensor> once{plain->a->weight, plain->b->weight, plain->b->bias};
    torch::optim::AdamW optimizer(once, torch::optim::AdamWOptions(0.01).weight_decay(0));
    optimizer.step();
    comm::spawn(ranks, [&](comm::Group& world) {
      auto model = std::make_shared<Model>();
      dovetail::OptimizerOptions plain_adamw;
      Engine engine(model, borrow(world), options(ranks, ranks, ranks), make_optimizer(plain_adamw, {}));
      ASSERT_EQ(engine.plan().tensors.size(), 3u);
      ASSERT_EQ(engine.aliases().size(), 1u);
      EXPECT_EQ(engine.aliases()[0].tensor, name);
      loss(*model, world.rank()).backward();
      expect_close(whole_gradient(engine, name) / ranks, plain->a->weight.grad(), name);
      engine.step(0.01f, 1.0 / ranks);
      expect_close(whole_parameter(engine, name), plain->a->weight.detach(), "after AdamW", 1e-5);
    });
  }
}

TEST(B06, TiedWeightsInTwoUnits) {
  check_tied<false>();
  check_tied<true>();
}

// B08.
struct Small : Module {
  Small() {
    first = register_module("first", std::make_shared<ops::Unit<ops::Linear>>(4, 4));
    last = register_module("last", std::make_shared<ops::Linear>(4, 1));
    initialise(*this, 9);
  }
  at::Tensor forward(at::Tensor x) { return last->forward(at::tanh(first->forward(x))); }
  std::shared_ptr<ops::Unit<ops::Linear>> first;
  std::shared_ptr<ops::Linear> last;
};

TEST(B08, BackwardTwiceGivesExactlyTwice) {
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Small>>();
    Engine engine(model, borrow(world), options(2, 2, 2), sgd());
    model->forward(batch(world.rank(), {3, 4})).sum().backward();
    std::vector<at::Tensor> once;
    for (int i = 0; i < 4; ++i) once.push_back(engine.whole_gradient(i));
    engine.zero_grad();
    at::Tensor loss = model->forward(batch(world.rank(), {3, 4})).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(engine.whole_gradient(i).equal(2 * once[i])) << i;
  });
}

TEST(B08, SecondOrder) {
  auto penalty = [](auto& m, int r) {
    at::Tensor x = batch(r, {3, 4}).set_requires_grad(true);
    at::Tensor y = m.forward(x).sum();
    at::Tensor g = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    return (g.norm(2, 1) - 1).pow(2).mean();
  };
  expect_reference_gradients([] { return std::make_shared<ops::Unit<Small>>(); }, penalty, {1, 2, 4});
}

TEST(B08, GraphOfParameterGradientsIsRefusedAtTheCall) {
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Small>>();
    Engine engine(model, borrow(world), options(2, 2, 2), sgd());
    at::Tensor loss = model->forward(batch(world.rank(), {3, 4})).sum();
    try {
      loss.backward({}, true, /*create_graph=*/true);
      FAIL();
    } catch (const StateError& e) {
      EXPECT_NE(std::string(e.what()).find("create_graph"), std::string::npos) << e.what();
    }
  });
}

// B10.
struct Two : Module {
  Two() {
    u0 = register_module("u0", std::make_shared<ops::Unit<ops::Linear>>(4, 4));
    u1 = register_module("u1", std::make_shared<ops::Unit<ops::Linear>>(4, 4));
    initialise(*this, 2);
  }
  at::Tensor forward(at::Tensor x) { return u1->forward(u0->forward(x)); }
  std::shared_ptr<ops::Unit<ops::Linear>> u0, u1;
};

TEST(B10, FrozenAtFirstAndLaterThawed) {
  comm::spawn(2, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Two>>(), never = std::make_shared<ops::Unit<Two>>();
    Engine engine(model, borrow(world), options(2, 2, 2, "bf16"), adamw());
    Engine other(never, borrow(world), options(2, 2, 2, "bf16"), adamw());
    auto backward = [&](auto& m) { m->forward(batch(world.rank(), {3, 4})).to(at::kFloat).pow(2).sum().backward(); };
    auto freeze = [&](bool frozen) {
      for (auto& p : model->u0->parameters()) p.set_requires_grad(!frozen);
    };
    auto reduced = [&] { return world.counters().read().of(comm::Phase::reduce).sent; };
    const at::Tensor initial = whole_parameter(engine, "u0.weight");
    freeze(true);
    int64_t before = reduced();
    backward(model);
    const plan::SentBytes want = plan::sent_bytes(
        engine.plan(), world.rank(), {.micro_batches = 1, .synchronise_each = true, .trainable = {false, true, true}});
    EXPECT_EQ(reduced() - before, want.reduce);
    EXPECT_EQ(whole_gradient(engine, "u0.weight").abs().max().item<float>(), 0);
    engine.step(0, 0.5);  // u1 stays where it is too: the run that was never frozen has the same weights
    EXPECT_TRUE(whole_parameter(engine, "u0.weight").equal(initial));
    for (const StateEntry& e : engine.state()) {
      if (e.tensor != "u0.weight" || e.field == "weight") continue;
      for (int64_t i = 0; i < e.elements.size(); ++i) EXPECT_EQ(reinterpret_cast<float*>(e.data)[i], 0);
    }
    freeze(false);
    backward(model);
    backward(never);
    const at::Tensor thawed = whole_gradient(engine, "u0.weight");
    EXPECT_EQ(thawed.scalar_type(), at::kFloat);
    EXPECT_GT(thawed.abs().max().item<float>(), 0);
    EXPECT_TRUE(thawed.equal(whole_gradient(other, "u0.weight")));
    engine.step(0.01f, 0.5);
    const at::Tensor moved = whole_parameter(engine, "u0.weight");
    EXPECT_FALSE(moved.equal(initial));
    auto state = [&] {
      std::string bytes;
      for (const StateEntry& e : engine.state())
        if (e.tensor.starts_with("u0."))
          bytes.append(reinterpret_cast<const char*>(e.data), e.elements.size() * size_of(e.dtype));
      return bytes;
    };
    const std::string kept = state();
    freeze(true);
    before = reduced();
    backward(model);
    EXPECT_EQ(reduced() - before, want.reduce);
    engine.step(0.01f, 0.5);
    EXPECT_TRUE(whole_parameter(engine, "u0.weight").equal(moved));
    EXPECT_EQ(state(), kept);
  });
}

// B22, the engine's half: buffers.
struct Buffered : Module {
  explicit Buffered(bool meta) {
    linear = register_module("linear", std::make_shared<ops::Linear>(4, 4));
    initialise(*linear, 1);
    frequencies = register_buffer("frequencies", at::pow(10.0, -at::arange(4, at::kFloat) / 4));
    count = register_buffer("count", meta ? at::empty({}, at::TensorOptions(at::kMeta).dtype(at::kLong))
                                          : at::full({}, 3, at::kLong));
  }
  at::Tensor forward(at::Tensor x) { return linear->forward(x) * frequencies.to(x.scalar_type()); }
  std::shared_ptr<ops::Linear> linear;
  at::Tensor frequencies, count;
};

TEST(B22, BuffersKeepTheirValuesAndTypes) {
  for (int ranks : {2, 4})
    comm::spawn(ranks, [&](comm::Group& world) {
      auto model = std::make_shared<ops::Unit<Buffered>>(false);
      Engine engine(model, borrow(world), options(ranks, ranks, ranks, "bf16"), sgd());
      model->forward(batch(0, {2, 4})).to(at::kFloat).sum().backward();
      engine.step(0.1f, 1);
      EXPECT_EQ(model->frequencies.scalar_type(), at::kFloat);
      EXPECT_NEAR(model->frequencies[1].item<float>(), .56234, 1e-5);
      EXPECT_NEAR(model->frequencies[3].item<float>(), .17783, 1e-5);
      EXPECT_EQ(model->count.item<int64_t>(), 3);
    });
  comm::spawn(1, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Buffered>>(true);
    try {
      Engine engine(model, borrow(world), options(1, 1, 1), sgd());
      FAIL();
    } catch (const ConfigError& e) {
      EXPECT_NE(std::string(e.what()).find("buffer count"), std::string::npos) << e.what();
    }
  });
}

// B24, the library's half: rank 0 runs two passes, rank 1 one and then a barrier.
TEST(B24, DifferentNumbersOfMicroBatchesAreNamed) {
  for (int64_t zero3 : {1, 2}) {
    std::mutex mutex;
    std::vector<std::string> errors;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_ANY_THROW(comm::spawn(
        2,
        [&](comm::Group& world) {
          auto net = make_net();
          Engine engine(net, borrow(world), options(2, 2, zero3), sgd());
          try {
            for (int pass = 0; pass < 2 - world.rank(); ++pass) net->forward(batch(0, {2, 5})).sum().backward();
            world.barrier({.step = engine.steps_done(), .label = "end of epoch"});
          } catch (const CommError& e) {
            std::lock_guard lock(mutex);
            errors.push_back(e.what());
            throw;
          }
        },
        std::chrono::milliseconds(2000)));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
    ASSERT_EQ(errors.size(), 2u);
    for (const std::string& e : errors) {
      EXPECT_THAT(e, ::testing::ContainsRegex("step 0")) << "the step";
      EXPECT_THAT(e, ::testing::ContainsRegex("root|block[0-2]")) << "the unit";
      EXPECT_THAT(e, ::testing::ContainsRegex("rank [01].*rank [01]")) << "both ranks";
    }
  }
}

}  // namespace
}  // namespace dovetail
