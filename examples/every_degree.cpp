// A module of one's own, trained on four ranks once for every legal choice of degrees: what a rank
// holds changes, the bits of the result do not. Ranks are threads here; over processes only the
// Group is another one (comm/c10d/world.h).
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <set>

#include "dovetail/comm/threads/spawn.h"
#include "dovetail/engine/engine.h"
#include "dovetail/models/common/init.h"
#include "dovetail/ops/linear.h"
#include "dovetail/ops/unit.h"
#include "dovetail/update/optimizer.h"

namespace {

using namespace dovetail;

constexpr int kRanks = 4, kSamples = 8, kWidth = 64;

struct Block : torch::nn::Module {
  Block() {
    up = register_module("up", std::make_shared<ops::Linear>(kWidth, 4 * kWidth));
    down = register_module("down", std::make_shared<ops::Linear>(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(up->forward(x).relu()); }
  std::shared_ptr<ops::Linear> up, down;  // write their weight gradients where the engine says
};

struct Net : torch::nn::Module {
  Net() {
    for (const char* name : {"first", "second", "third"})  // gathered one by one
      blocks.push_back(register_module(name, std::make_shared<ops::Unit<Block>>()));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<ops::Unit<Block>>> blocks;
};

// One rank: learns to shift a vector by one place. Returns the gradient norm of the last step and
// the bytes held.
std::pair<double, int64_t> train(comm::Group& world, const plan::Degrees& degrees) {
  auto net = std::make_shared<ops::Unit<Net>>();
  for (const auto& p : net->named_parameters())
    models::fill_normal(p.value(), 0.05, /*seed=*/1, p.key());
  EngineOptions options;
  options.plan.degrees = degrees;
  options.norm.max_norm = 1;
  Engine engine(net, {std::shared_ptr<void>(), &world}, options,
                make_optimizer({.name = "adamw"}, {}));
  double norm = 0;
  for (uint64_t step = 1; step <= 20; ++step) {
    const at::Tensor x = at::empty({kSamples, kWidth});
    models::fill_normal(x, 1, step, fmt::format("samples of rank {}", world.rank()));
    (net->forward(x) - x.roll(1, -1)).pow(2).sum().backward();  // gathers and reduces
    norm = engine.step(/*lr=*/3e-3f, 1.0 / (kRanks * kSamples * kWidth)).grad_norm;
  }
  return {norm, engine.held().total()};
}

}  // namespace

int main() {
  std::set<double> norms;
  for (const plan::Degrees& degrees : plan::legal_chains(kRanks)) {
    comm::spawn(kRanks, [&](comm::Group& world) {
      const auto [norm, held] = train(world, degrees);
      if (world.rank() != 0) return;
      norms.insert(norm);
      fmt::print("zero1,2,3 = {}: gradient norm {:.17g}, rank 0 holds {} bytes\n",
                 plan::to_text(degrees), norm, held);
    });
  }
  return norms.size() == 1 ? 0 : 1;
}
