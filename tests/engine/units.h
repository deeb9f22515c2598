// Models with every kind of update unit, and optimizers for them.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "dovetail/ops/unit.h"
#include "dovetail/update/optimizer.h"
#include "tests/engine/support.h"

namespace dovetail::testing {

// A parameter of any kind; its "layer" is a sum of squares, so that gradients depend on weights and data.
struct ZooSpec {
  std::string name;
  std::vector<int64_t> shape;
};

struct ZooBlock : torch::nn::Module {
  explicit ZooBlock(std::vector<ZooSpec> specs);
  at::Tensor forward(at::Tensor x);  // x [n]: any length
  std::vector<at::Tensor> parameters_in_order;
};

// Fused and unfused QKV, heads along columns, fused experts, a convolution, an embedding, vectors.
struct Zoo : torch::nn::Module {
  Zoo();
  at::Tensor forward(at::Tensor x);
  std::vector<std::shared_ptr<ops::Unit<ZooBlock>>> blocks;
};

std::shared_ptr<ops::Unit<Zoo>> make_zoo();
std::vector<TensorSpec> zoo_hints();  // kinds, heads and nodes of all parameters of the zoo
// "adamw", "adam8", "sgd", "muon", "muon_head", "muon_qkv", "shampoo", "shampoo_rmsprop", "mixed".
std::vector<std::string> optimizer_names();
UpdateOps optimizer(const std::string& name, const std::vector<TensorSpec>& tensors);

}  // namespace dovetail::testing
