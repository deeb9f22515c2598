// Ranks that address one another's memory: what is not copied, what is not kept, and who may write when.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "dovetail/engine/trace.h"
#include "dovetail/ops/embedding.h"
#include "dovetail/plan/bytes.h"
#include "dovetail/plan/schedule.h"
#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;
using torch::nn::Module;

// One linear whose forward shows where its weight lies and may be held up.
struct Probe : Module {
  Probe(int64_t in, int64_t out) { linear = register_module("linear", std::make_shared<ops::Linear>(in, out)); }
  at::Tensor forward(at::Tensor x) {
    if (seen) seen(linear->weight);
    return linear->forward(x);
  }
  std::shared_ptr<ops::Linear> linear;
  std::function<void(const at::Tensor&)> seen;
};

TEST(Peer, WholeParametersAreOneMemoryOfAllRanks) {
  for (const std::string format : {"fp32", "bf16"}) {
    std::mutex mutex;
    std::set<const void*> places;
    run_ranks(Transport::peer, 4, [&](comm::Group& world) {
      auto model = std::make_shared<ops::Unit<Probe>>(64, 48);
      initialise(*model, 3);
      Engine engine(model, borrow(world), options(4, 4, 4, format), adamw());
      model->seen = [&](const at::Tensor& weight) {
        std::lock_guard lock(mutex);
        places.insert(weight.const_data_ptr());
      };
      const comm::Counts before = world.counters().read();
      model->forward(batch(world.rank(), {2, 64})).sum().backward();
      engine.step(0.1f, 1);
      const comm::Counts sent = world.counters().read() - before;
      EXPECT_EQ(sent.of(comm::Phase::gather_forward).sent + sent.of(comm::Phase::gather_backward).sent, 0);
      EXPECT_EQ(sent.sent(), plan::sent_bytes(engine.plan(), world.rank(), {}).total());
      EXPECT_EQ(engine.held(), engine.predicted_held());
      EXPECT_EQ(engine.held().slots, plan::slot_bytes(engine.plan(), 0).gradient) << "only a gradient needs a slot";
    });
    EXPECT_EQ(places.size(), 1u) << format;
  }
}

// Rank 0 changes its weights as soon as a pass has returned to it, while rank 1 is still inside: an evaluation, a
// forward pass whose backward never comes, or a training pass.
TEST(Peer, WeightsWrittenAfterAPassAreNotSeenInIt) {
  enum class Pass { evaluation, forward, training };
  for (const Pass pass : {Pass::evaluation, Pass::forward, Pass::training}) {
    std::atomic<bool> written{false};
    run_ranks(Transport::peer, 2, [&](comm::Group& world) {
      auto model = std::make_shared<ops::Unit<Probe>>(32, 32);
      initialise(*model, 3);
      Engine engine(model, borrow(world), options(2, 2, 2), sgd());
      auto parameters = engine.parameters();
      const at::Tensor x = batch(7, {2, 32});
      model->seen = [&](const at::Tensor&) {
        if (world.rank() == 0 || written) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 is long through
        EXPECT_FALSE(written) << "written while this rank still reads";
      };
      auto plain = std::make_shared<Probe>(32, 32);
      initialise(*plain, 3);
      at::Tensor y;
      {
        at::AutoGradMode grad(pass != Pass::evaluation);
        y = model->forward(x);
      }
      if (pass == Pass::training) y.sum().backward();
      if (world.rank() == 0) written = true;
      for (auto& p : parameters) p.main.zero_();
      EXPECT_TRUE(at::allclose(y.detach(), plain->forward(x), 1e-5, 1e-6));
      at::NoGradGuard no_grad;
      EXPECT_TRUE(model->forward(x).equal(at::zeros({2, 32}))) << "and the next pass sees what all ranks wrote";
    });
  }
}

struct Table : Module {
  Table(int64_t rows, int64_t width) {
    table = register_module("table", std::make_shared<ops::Unit<ops::Embedding>>(rows, width));
    head = register_module("head", std::make_shared<ops::Unit<ops::Linear>>(width, 3));
  }
  at::Tensor forward(at::Tensor places) { return head->forward(table->forward(places)); }
  std::shared_ptr<ops::Unit<ops::Embedding>> table;
  std::shared_ptr<ops::Unit<ops::Linear>> head;
};

at::Tensor rows_of(int step, int rank) {
  return at::tensor({17 + step, 4000 - rank, 17 + step, 300 * (rank + 1)}, at::kLong);
}

int64_t resident_pages(const at::Tensor& t) {
  auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr()) / 4096 * 4096;
  const size_t bytes = reinterpret_cast<uintptr_t>(t.const_data_ptr()) + t.nbytes() - begin;
  std::vector<unsigned char> pages((bytes + 4095) / 4096);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), bytes, pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
}

// Gradients of few rows, over steps and micro-batches, against autograd; and that most of the shard takes no memory.
TEST(Peer, GradientsOfFewRows) {
  for (const Transport transport : {Transport::peer, Transport::threads})
    for (const plan::Degrees d : {plan::Degrees{2, 2, 2}, plan::Degrees{2, 2, 1}, plan::Degrees{2, 1, 1}})
      for (const std::string format : {"fp32", "bf16"}) {
        auto plain = std::make_shared<Table>(4096, 256);
        initialise(*plain, 5);
        run_ranks(transport, 2, [&](comm::Group& world) {
          auto model = std::make_shared<ops::Unit<Table>>(4096, 256);
          initialise(*model, 5);
          Engine engine(model, borrow(world), options(d.zero1, d.zero2, d.zero3, format), sgd());
          for (int step = 0; step < 3; ++step) {
            at::Tensor want = at::zeros({4096, 256});
            for (int micro = 0; micro < 2; ++micro) {
              model->forward(rows_of(2 * step + micro, world.rank())).to(at::kFloat).sum().backward();
              for (int rank = 0; rank < 2; ++rank) {
                const at::Tensor g = plain->head->weight.detach().sum(0).expand({4, 256});
                want.index_add_(0, rows_of(2 * step + micro, rank), g);
              }
            }
            // Before anything reads it: reading maps pages too.
            const at::Tensor grad = engine.parameters()[0].grad;
            ASSERT_EQ(engine.parameters()[0].spec->name, "table.weight");
            if (transport == Transport::peer && d.zero1 == d.zero2 && d.zero3 == 2) {
              EXPECT_LT(resident_pages(grad), 64) << "of " << grad.nbytes() / 4096;
            }
            const double bound = format == "fp32" ? 1e-5 : 0.02;
            EXPECT_TRUE(at::allclose(whole_gradient(engine, "table.weight"), want, bound, bound)) << step;
            engine.step(0, 1);
            EXPECT_EQ(engine.held(), engine.predicted_held());
          }
        });
      }
}

TEST(Trace, OwnTimesAddUpToTheOutermostSpan) {
  int64_t blocked = 0;
  Trace trace([&] { return blocked; });
  auto pass = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  {
    const TraceScope step(&trace, Doing::compute, "step", "1");
    pass(2);
    {
      const TraceScope reduce(&trace, Doing::reduce, "reduce", "a");
      pass(4);
      blocked += 3'000'000;
      const TraceScope wait(&trace, Doing::wait, "inside");
      pass(1);
      blocked += 1'000'000;  // of the span that waits anyway
    }
    const TraceScope nothing(nullptr, Doing::update, "not recorded");
  }
  ASSERT_EQ(trace.spans().size(), 4u);
  const TraceSpan& step = trace.spans().back();
  EXPECT_EQ(step.name, "step 1");
  const auto totals = trace.totals();
  EXPECT_EQ(totals[0] + totals[1] + totals[2] + totals[3] + totals[4], step.end - step.begin);
  EXPECT_GE(totals[static_cast<int>(Doing::wait)], 4'000'000);
  auto length = [&](const std::string& name) {
    for (const TraceSpan& span : trace.spans())
      if (span.name == name) return span.end - span.begin;
    return int64_t{-1};
  };
  EXPECT_EQ(totals[static_cast<int>(Doing::reduce)], length("reduce a") - length("inside") - 3'000'000);
  EXPECT_EQ(totals[static_cast<int>(Doing::update)], 0);
  EXPECT_THROW(trace.end(), InvariantError);
}

TEST(Trace, WaitsLieBetweenSpansInside) {
  int64_t blocked = 0;
  Trace trace([&] { return blocked; });
  auto pass = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  trace.begin(Doing::compute, "step");
  for (int i = 0; i < 3; ++i) {
    pass(1);
    trace.begin(Doing::encode, "inside");
    pass(2);
    trace.end();
  }
  blocked += 2'500'000;  // more than any gap holds
  trace.end();
  int64_t waited = 0;
  for (const TraceSpan& a : trace.spans()) {
    waited += a.name == "wait in step" ? a.own : 0;
    for (const TraceSpan& b : trace.spans()) {
      const bool apart = a.end <= b.begin || b.end <= a.begin;
      const bool inside = (a.begin <= b.begin && b.end <= a.end) || (b.begin <= a.begin && a.end <= b.end);
      EXPECT_TRUE(apart || inside) << a.name << " and " << b.name;
    }
  }
  EXPECT_EQ(waited, 2'500'000);
  EXPECT_EQ(trace.totals()[static_cast<int>(Doing::wait)], 2'500'000);
}

TEST(Trace, AStepShowsEveryUnitAndKind) {
  for (const Transport transport : {Transport::peer, Transport::threads})
    for (const bool recompute : {false, true})
      run_ranks(transport, 2, [&](comm::Group& world) {
        auto net = make_net();
        EngineOptions o = options(2, 2, 2, "bf16");
        o.recompute = recompute;
        Engine engine(net, borrow(world), o, adamw());
        const auto trace = std::make_shared<Trace>([&] { return static_cast<int64_t>(world.blocked().count()); });
        engine.record_into(trace);
        for (int step = 0; step < 2; ++step) {
          const TraceScope traced(trace.get(), Doing::compute, "step");
          net->forward(batch(world.rank(), {4, 5})).to(at::kFloat).sum().backward();
          engine.step(0.1f, 1);
        }
        engine.record_into(nullptr);
        net->forward(batch(world.rank(), {4, 5})).to(at::kFloat).sum().backward();
        std::map<std::string, int> names;
        int64_t steps = 0;
        for (const TraceSpan& span : trace->spans()) {
          ++names[span.name];
          EXPECT_GE(span.own, 0) << span.name;
          EXPECT_LE(span.begin, span.end);
          if (span.name == "step") steps += span.end - span.begin;
        }
        for (const char* unit : {"block0", "block1", "block2"}) {
          EXPECT_EQ(names[std::string("forward ") + unit], 2) << unit;  // recomputation is in the backward
          EXPECT_EQ(names[std::string("backward ") + unit], 2) << unit;
          EXPECT_EQ(names[std::string("reduce ") + unit], 2) << unit;
        }
        EXPECT_EQ(names["update"], 2);
        EXPECT_EQ(names["norm"], 2);
        const auto totals = trace->totals();
        EXPECT_EQ(std::accumulate(totals.begin(), totals.end(), int64_t{0}), steps);
        for (int64_t kind : totals) EXPECT_GT(kind, 0);
      });
}

}  // namespace
}  // namespace dovetail
