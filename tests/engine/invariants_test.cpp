// What must always hold (design section 9): 1, 2 and 3.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "dovetail/plan/degrees.h"
#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;

struct Outcome {
  std::string weights;
  std::vector<double> losses;
  bool operator==(const Outcome&) const = default;
};

// Five steps of AdamW with clipping; every rank must come to the same weights, which are returned.
Outcome train(Transport transport, int ranks, const EngineOptions& base, int steps = 5, int64_t micro_batches = 1) {
  Outcome first;
  std::mutex mutex;
  bool any = false;
  run_ranks(transport, ranks, [&](comm::Group& world) {
    auto net = make_net();
    EngineOptions o = base;
    o.norm.max_norm = 0.5;
    Engine engine(net, borrow(world), o, adamw());
    Outcome mine;
    for (int step = 0; step < steps; ++step) {
      for (int64_t m = 0; m < micro_batches; ++m) {
        if (base.plan.local_accumulation) engine.set_gradient_sync(m + 1 == micro_batches);
        at::Tensor x = batch((step * micro_batches + m) * ranks + world.rank(), {4, 5});
        at::Tensor loss = net->forward(x).to(at::kFloat).pow(2).sum();
        loss.backward();
      }
      const StepResult r = engine.step(0.01, 1.0 / static_cast<double>(ranks * micro_batches));
      mine.losses.push_back(r.grad_norm);
      EXPECT_LT(r.clip_coefficient, 1);
    }
    mine.weights = bits(whole_parameters(engine));
    EXPECT_EQ(engine.held(), engine.predicted_held());
    std::lock_guard lock(mutex);
    if (!std::exchange(any, true)) first = mine;
    EXPECT_EQ(first, mine);
  });
  return first;
}

class Chains : public ::testing::TestWithParam<std::tuple<Transport, int, std::string>> {};

TEST_P(Chains, EveryLegalChainGivesTheSameBits) {
  const auto [transport, ranks, format] = GetParam();
  std::optional<Outcome> first;
  for (const plan::Degrees& d : plan::legal_chains(ranks)) {
    const Outcome got = train(transport, ranks, options(d.zero1, d.zero2, d.zero3, format));
    if (!first) first = got;
    EXPECT_EQ(first->weights, got.weights) << plan::to_text(d);
    EXPECT_EQ(first->losses, got.losses) << plan::to_text(d);
  }
  EXPECT_EQ(*first, train(Transport::threads, ranks, options(1, 1, 1, format)));
}

INSTANTIATE_TEST_SUITE_P(All, Chains,
                         ::testing::Combine(::testing::Values(Transport::threads, Transport::peer, Transport::hosts,
                                                              Transport::gloo),
                                            ::testing::Values(2, 4, 8), ::testing::Values("fp32", "bf16")),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) +
                                  std::to_string(std::get<1>(info.param)) + std::get<2>(info.param);
                         });

// A backend's own collectives sum over the same tree; they want more scratch than the plan foresees.
TEST(Invariants, NativeCollectivesGiveTheSameBits) {
  for (const plan::Degrees d : {plan::Degrees{2, 2, 2}, plan::Degrees{2, 2, 1}, plan::Degrees{2, 1, 1}})
    for (const std::string format : {"fp32", "bf16"}) {
      Outcome got;
      std::mutex mutex;
      run_ranks(Transport::gloo_native, 2, [&](comm::Group& world) {
        auto net = make_net();
        EngineOptions o = options(d.zero1, d.zero2, d.zero3, format);
        o.norm.max_norm = 0.5;
        Engine engine(net, borrow(world), o, adamw());
        Outcome mine;
        for (int step = 0; step < 5; ++step) {
          net->forward(batch(step * 2 + world.rank(), {4, 5})).to(at::kFloat).pow(2).sum().backward();
          mine.losses.push_back(engine.step(0.01, 0.5).grad_norm);
        }
        mine.weights = bits(whole_parameters(engine));
        std::lock_guard lock(mutex);
        got = mine;
      });
      EXPECT_EQ(got, train(Transport::threads, 2, options(2, 2, 2, format))) << plan::to_text(d);
    }
}

TEST(Invariants, ScheduleOptionsDoNotChangeBits) {
  const Outcome plain = train(Transport::threads, 4, options(4, 2, 2));
  std::vector<EngineOptions> variants(9, options(4, 2, 2));
  variants[0].plan.prefetch = 0;
  variants[1].plan.prefetch = 3;
  variants[2].plan.pending_reductions = 0;
  variants[3].plan.pending_reductions = 3;
  variants[4].plan.reshard_after_forward = false;
  variants[5].plan.block = BlockKind::row;
  variants[6].plan.block = BlockKind::row;
  variants[6].plan.segments = 2;
  variants[7].recompute = true;
  variants[8].plan.alignment = 1;
  for (size_t i = 0; i < variants.size(); ++i)
    EXPECT_EQ(plain, train(Transport::threads, 4, variants[i])) << "variant " << i;
}

// Where sums are taken in another order, weights agree to 1e-6 of their norm.
void expect_near(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]).to(at::kDouble).pow(2).sum().item<double>();
    norm += a[i].to(at::kDouble).pow(2).sum().item<double>();
  }
  EXPECT_LE(std::sqrt(difference), 1e-6 * std::sqrt(norm));
}

std::vector<at::Tensor> accumulate(int ranks, int micro_batches, const EngineOptions& base) {
  std::vector<at::Tensor> result;
  run_ranks(Transport::threads, ranks, [&](comm::Group& world) {
    auto net = make_net();
    Engine engine(net, borrow(world), base, adamw());
    for (int step = 0; step < 5; ++step) {
      for (int m = 0; m < micro_batches; ++m) {
        if (base.plan.local_accumulation) engine.set_gradient_sync(m + 1 == micro_batches);
        const int64_t sample = (step * micro_batches + m) * ranks + world.rank();
        net->forward(batch(sample, {4, 5})).pow(2).sum().backward();
      }
      engine.step(0.01, 1.0 / (ranks * micro_batches));
    }
    auto whole = whole_parameters(engine);
    if (world.rank() == 0) result = whole;
  });
  return result;
}

TEST(Invariants, RanksEqualOneProcessThatAccumulatesMicroBatches) {
  const auto one = accumulate(1, 8, options(1, 1, 1));
  for (const plan::Degrees& d : plan::legal_chains(4)) {
    expect_near(one, accumulate(4, 2, options(d.zero1, d.zero2, d.zero3)));
    EngineOptions local = options(d.zero1, d.zero2, d.zero3);
    local.plan.local_accumulation = true;
    expect_near(one, accumulate(4, 2, local));
  }
  expect_near(one, accumulate(8, 1, options(8, 4, 2)));
}

TEST(Invariants, InjectedGradientsGiveTheSameBitsAtEveryWorldSize) {
  for (const std::string format : {"fp32", "bf16"}) {
    std::string first;
    for (int ranks : {1, 2, 4}) {
      for (const plan::Degrees& d : plan::legal_chains(ranks)) {
        run_ranks(Transport::threads, ranks, [&](comm::Group& world) {
          auto net = make_net();
          EngineOptions o = options(d.zero1, d.zero2, d.zero3, format);
          o.norm.max_norm = 1;
          Engine engine(net, borrow(world), o, adamw());
          for (int step = 0; step < 3; ++step) {
            std::vector<at::Tensor> gradients;
            for (const TensorSpec& t : engine.plan().tensors) gradients.push_back(batch(step, t.shape));
            engine.inject_gradients(gradients);
            engine.step(0.01, 1.0 / ranks);
          }
          const std::string mine = bits(whole_parameters(engine));
          if (world.rank() != 0) return;
          if (first.empty()) first = mine;
          EXPECT_EQ(first, mine) << ranks << " ranks, " << plan::to_text(d);
        });
      }
    }
  }
}

TEST(Invariants, BytesSentAreThePlans) {
  for (int ranks : {2, 4, 8}) {
    for (const plan::Degrees& d : plan::legal_chains(ranks)) {
      for (const std::string format : {"fp32", "bf16"}) {
        for (bool local : {false, true}) {
          run_ranks(Transport::threads, ranks, [&, d](comm::Group& world) {
            auto net = make_net();
            EngineOptions o = options(d.zero1, d.zero2, d.zero3, format);
            o.plan.local_accumulation = local;
            Engine engine(net, borrow(world), o, adamw());
            const comm::Counts before = world.counters().read();
            for (int m = 0; m < 2; ++m) {
              if (local) engine.set_gradient_sync(m == 1);
              net->forward(batch(world.rank(), {4, 5})).to(at::kFloat).pow(2).sum().backward();
            }
            engine.step(0.01, 0.5);
            const comm::Counts sent = world.counters().read() - before;
            const plan::SentBytes want = plan::sent_bytes(
                engine.plan(), world.rank(), {.micro_batches = 2, .synchronise_each = !local, .trainable = {}});
            EXPECT_EQ(sent.of(comm::Phase::refresh).sent, want.refresh);
            EXPECT_EQ(sent.of(comm::Phase::gather_forward).sent, want.gather_forward);
            EXPECT_EQ(sent.of(comm::Phase::gather_backward).sent, want.gather_backward);
            EXPECT_EQ(sent.of(comm::Phase::reduce).sent, want.reduce);
            EXPECT_EQ(sent.of(comm::Phase::reduce_main).sent, want.reduce_main);
            EXPECT_EQ(sent.sent(), want.total());
            EXPECT_EQ(engine.held(), engine.predicted_held());
          });
        }
      }
    }
  }
}

// A block that notes where its parameters lie while it runs.
struct Watching : Block {
  using Block::Block;
  at::Tensor forward(at::Tensor x) {
    seen.clear();
    for (const at::Tensor& t : {up->weight, up->bias, down->weight, scale})
      seen.push_back(static_cast<char*>(t.data_ptr()));
    return Block::forward(x);
  }
  std::vector<char*> seen;
};

TEST(Invariants, GatheredParametersAreViewsOfOneBufferAndNothingIsCopied) {
  run_ranks(Transport::threads, 2, [&](comm::Group& world) {
    auto block = std::make_shared<ops::Unit<Watching>>(8, 16);
    initialise(*block, 3);
    block->scale.set_requires_grad(false);  // the rest writes its gradients in place, save for the bias
    block->up->bias.set_requires_grad(false);
    Engine engine(block, borrow(world), options(2, 2, 2), adamw());
    const int64_t initial = engine.ledger().copied(CopyReason::initial);
    for (int step = 0; step < 3; ++step) {
      block->forward(batch(world.rank(), {4, 8})).sum().backward();
      engine.step(0.01, 0.5);
    }
    const SegmentLayout& layout = engine.plan().groups[0].buckets[0].segments[0];
    std::map<std::string, int64_t> offset;
    for (const Placement& p : layout.placements) offset[engine.plan().tensors[p.tensor].name] = p.offset;
    const std::vector<std::string> names{"up.weight", "up.bias", "down.weight", "scale"};
    for (size_t i = 1; i < names.size(); ++i)
      EXPECT_EQ(block->seen[i] - block->seen[0], 4 * (offset.at(names[i]) - offset.at(names[0])));
    EXPECT_EQ(engine.ledger().copied(CopyReason::initial), initial);
    EXPECT_EQ(engine.ledger().copied(CopyReason::encode), 0);
    EXPECT_EQ(engine.ledger().copied(CopyReason::gradient), 0);
  });
}

}  // namespace
}  // namespace dovetail
