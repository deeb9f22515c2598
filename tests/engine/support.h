// Small models and helpers for engine tests.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dovetail/engine/engine.h"
#include "dovetail/ops/linear.h"
#include "dovetail/ops/unit.h"

namespace dovetail::testing {

// scale * tanh(up(x)) down, plus x: linears that write their gradients, and an ordinary vector.
struct Block : torch::nn::Module {
  Block(int64_t width, int64_t hidden);
  at::Tensor forward(at::Tensor x);
  std::shared_ptr<ops::Linear> up, down;
  at::Tensor scale;
};

// Ordinary matmul with a parameter in and out, a 0-dim temperature and a zero-element parameter: the root's own.
struct Net : torch::nn::Module {
  Net(int64_t in, int64_t width, int64_t hidden, int64_t blocks);
  at::Tensor forward(at::Tensor x);
  at::Tensor in, out, temperature, nothing;
  std::vector<std::shared_ptr<ops::Unit<Block>>> blocks;
};

// Fills all parameters from the seed, the same on every rank.
void initialise(torch::nn::Module& module, uint64_t seed);
std::shared_ptr<ops::Unit<Net>> make_net(uint64_t seed = 1);

// The batch of one (rank, step), any shape.
at::Tensor batch(int64_t index, at::IntArrayRef shape);

std::shared_ptr<comm::Group> borrow(comm::Group& world);

enum class Transport { threads, peer, hosts, gloo, gloo_native };  // hosts: peer, two ranks a host
std::string name_of(Transport transport);
// Ranks as threads over a transport.
void run_ranks(Transport transport, int size, const std::function<void(comm::Group&)>& body);

UpdateOps adamw();
UpdateOps sgd(float momentum = 0);
EngineOptions options(int64_t zero1, int64_t zero2, int64_t zero3, const std::string& format = "fp32");

// All main weights, whole, in plan order.
std::vector<at::Tensor> whole_parameters(Engine& engine);
// By name.
at::Tensor whole_parameter(Engine& engine, const std::string& name);
at::Tensor whole_gradient(Engine& engine, const std::string& name);


// FNV over bytes: equal exactly when bits are.
std::string bits(const std::vector<at::Tensor>& tensors);

}  // namespace dovetail::testing
