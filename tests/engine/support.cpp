#include "tests/engine/support.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "dovetail/base/hash.h"
#include "dovetail/comm/c10d/world.h"
#include "dovetail/comm/threads/spawn.h"
#include "dovetail/update/optimizer.h"

namespace dovetail::testing {

Block::Block(int64_t width, int64_t hidden) {
  up = register_module("up", std::make_shared<ops::Linear>(width, hidden, true));
  down = register_module("down", std::make_shared<ops::Linear>(hidden, width, false));
  scale = register_parameter("scale", at::ones({hidden}));
}

at::Tensor Block::forward(at::Tensor x) { return x + down->forward(scale * at::tanh(up->forward(x))); }

Net::Net(int64_t in_features, int64_t width, int64_t hidden, int64_t count) {
  in = register_parameter("in", at::ones({in_features, width}));
  for (int64_t i = 0; i < count; ++i)
    blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<ops::Unit<Block>>(width, hidden)));
  out = register_parameter("out", at::ones({width, 3}));
  temperature = register_parameter("temperature", at::ones({}));
  nothing = register_parameter("nothing", at::ones({0, 5}));
}

at::Tensor Net::forward(at::Tensor x) {
  x = x.matmul(in);
  for (auto& b : blocks) x = b->forward(x);
  return x.matmul(out) * temperature + nothing.sum();
}

void initialise(torch::nn::Module& module, uint64_t seed) {
  at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& p : module.parameters()) {
    at::Tensor value = at::randn(p.sizes(), generator) * 0.3;
    p.copy_(p.dim() == 0 ? value + 1 : value);
  }
}

std::shared_ptr<ops::Unit<Net>> make_net(uint64_t seed) {
  auto net = std::make_shared<ops::Unit<Net>>(5, 6, 7, 3);
  initialise(*net, seed);
  return net;
}

at::Tensor batch(int64_t index, at::IntArrayRef shape) {
  return at::randn(shape, at::detail::createCPUGenerator(1000 + index));
}

std::shared_ptr<comm::Group> borrow(comm::Group& world) { return {std::shared_ptr<void>(), &world}; }

std::string name_of(Transport transport) {
  switch (transport) {
    case Transport::threads: return "threads";
    case Transport::peer: return "peer";
    case Transport::hosts: return "hosts";
    case Transport::gloo: return "gloo";
    case Transport::gloo_native: return "gloo_native";
  }
  return "?";
}

void run_ranks(Transport transport, int size, const std::function<void(comm::Group&)>& body) {
  if (transport == Transport::threads) return comm::spawn(size, body);
  if (transport == Transport::peer) return comm::spawn_peers(size, body);
  if (transport == Transport::hosts) return comm::spawn_peers(size, body, comm::kSpawnDeadline, /*ranks_per_host=*/2);
  auto store = c10::make_intrusive<c10d::HashStore>();
  comm::spawn_with(
      size,
      [&](int rank) {
        comm::WorldOptions o;
        o.rank = rank;
        o.size = size;
        o.store = store;
        if (transport == Transport::gloo_native) o.backend = comm::WorldBackend::gloo_native;
        o.deadline = comm::kSpawnDeadline;
        return comm::make_world(o);
      },
      body);
}

UpdateOps adamw() {
  OptimizerOptions o;
  return make_optimizer(o, {});
}

UpdateOps sgd(float momentum) {
  OptimizerOptions o;
  o.name = "sgd";
  o.sgd.momentum = momentum;
  return make_optimizer(o, {});
}

EngineOptions options(int64_t zero1, int64_t zero2, int64_t zero3, const std::string& format) {
  EngineOptions o;
  o.plan.degrees = {zero1, zero2, zero3};
  o.plan.format = format;
  return o;
}

std::vector<at::Tensor> whole_parameters(Engine& engine) {
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < std::ssize(engine.plan().tensors); ++i) all.push_back(engine.whole_parameter(i));
  return all;
}

namespace {
int64_t index_of(Engine& engine, const std::string& name) {
  const auto& tensors = engine.plan().tensors;
  for (int64_t i = 0; i < std::ssize(tensors); ++i)
    if (tensors[i].name == name) return i;
  throw std::runtime_error("no parameter " + name);
}
}  // namespace

at::Tensor whole_parameter(Engine& engine, const std::string& name) {
  return engine.whole_parameter(index_of(engine, name));
}

at::Tensor whole_gradient(Engine& engine, const std::string& name) {
  return engine.whole_gradient(index_of(engine, name));
}

std::string bits(const std::vector<at::Tensor>& tensors) {
  uint64_t h = 0;
  for (const at::Tensor& t : tensors) {
    const at::Tensor c = t.contiguous();
    if (c.nbytes()) h = hash64({static_cast<std::byte*>(c.data_ptr()), static_cast<size_t>(c.nbytes())}, h);
  }
  return fmt::format("{:016x}", h);
}

}  // namespace dovetail::testing
