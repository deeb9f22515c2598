#include "tests/engine/units.h"

#include <torch/torch.h>


namespace dovetail::testing {
namespace {

const std::vector<std::vector<ZooSpec>>& zoo_specs() {
  static const std::vector<std::vector<ZooSpec>> specs = {
      {{"qkv", {24, 16}}, {"o", {16, 16}}, {"norm", {16}}, {"table", {40, 16}}},
      {{"q", {12, 16}},
       {"k", {6, 16}},
       {"experts", {3, 8, 12}},
       {"conv", {6, 4, 3, 3}},
       {"tall", {50, 7}}},
      {{"big", {70, 64}}, {"long", {4100}}, {"small", {5, 9}}},
  };
  return specs;
}

}  // namespace

ZooBlock::ZooBlock(std::vector<ZooSpec> specs) {
  for (const ZooSpec& s : specs)
    parameters_in_order.push_back(register_parameter(s.name, at::ones(s.shape)));
}

at::Tensor ZooBlock::forward(at::Tensor x) {
  at::Tensor y = x;
  for (const at::Tensor& p : parameters_in_order) {
    const at::Tensor flat = p.flatten().to(x.scalar_type());
    const int64_t n = flat.numel(), length = x.numel();
    // Every element of the parameter meets some element of x.
    const at::Tensor data = y.repeat({n / length + 1}).slice(0, 0, n);
    y = y + at::tanh((flat * data).sum() * 0.01 + 0.1 * y);
  }
  return y;
}

Zoo::Zoo() {
  int number = 0;
  for (const auto& specs : zoo_specs())
    blocks.push_back(register_module("block" + std::to_string(number++),
                                     std::make_shared<ops::Unit<ZooBlock>>(specs)));
}

at::Tensor Zoo::forward(at::Tensor x) {
  for (auto& b : blocks) x = b->forward(x);
  return x;
}

std::shared_ptr<ops::Unit<Zoo>> make_zoo() {
  auto zoo = std::make_shared<ops::Unit<Zoo>>();
  initialise(*zoo, 5);
  return zoo;
}

std::vector<TensorSpec> zoo_hints() {
  std::vector<TensorSpec> hints;
  int number = 0;
  for (const auto& specs : zoo_specs()) {
    for (const ZooSpec& s : specs) {
      TensorSpec t{.name = "block" + std::to_string(number) + "." + s.name,
                   .shape = s.shape,
                   .kind = kind_of_shape(s.shape)};
      if (s.name == "qkv") {
        t.heads = 6;
        t.nodes = {{"qkv", 0, {0, 12, 18, 24}}};
      }
      if (s.name == "q") t.heads = 3;
      if (s.name == "o") t.heads = 4, t.heads_dim = 1;
      if (s.name == "experts") t.kind = ParamKind::expert;
      if (s.name == "table") t.kind = ParamKind::embedding;
      hints.push_back(t);
    }
    ++number;
  }
  return hints;
}

std::vector<std::string> optimizer_names() {
  return {"adamw",   "adam8",           "sgd",  "muon", "muon_head", "muon_qkv",
          "shampoo", "shampoo_rmsprop", "mixed"};
}

UpdateOps optimizer(const std::string& name, const std::vector<TensorSpec>& tensors) {
  OptimizerOptions o;
  o.name = name.substr(0, name.find('_'));
  o.rules.weight_decay = 0.1;
  o.sgd.momentum = 0.9;
  if (name == "muon_head") o.muon.unit = "head";
  if (name == "muon_qkv") o.muon.unit = "qkv";
  o.shampoo.block = 10;
  o.shampoo.every = 2;
  if (name == "shampoo_rmsprop") o.shampoo.grafting = Grafting::rmsprop;
  if (name == "mixed") {
    o.name = "muon";
    o.muon.scale = MuonScale::original;
    o.rules.rules = {{.pattern = "*experts", .lr_scale = 2, .optimizer = "shampoo"},
                     {.pattern = "*big", .weight_decay = 0, .optimizer = "adam8"},
                     {.pattern = "*small", .optimizer = "sgd"}};
  }
  return make_optimizer(o, tensors);
}

}  // namespace dovetail::testing
