#include "dovetail/ops/materialize.h"

#include <ATen/ops/empty_like.h>
#include <torch/nn/cloneable.h>

#include "dovetail/base/error.h"

namespace {
struct Registrar;
}

namespace torch::nn {
// Module keeps its registries to itself and to Cloneable; registering a name twice is an error
// there.
template <>
class Cloneable<Registrar> {
 public:
  static at::Tensor& parameter(Module& module, const std::string& name) {
    return module.parameters_[name];
  }
  static at::Tensor& buffer(Module& module, const std::string& name) {
    return module.buffers_[name];
  }
};
}  // namespace torch::nn

namespace dovetail::ops {
namespace {
using Registry = torch::nn::Cloneable<Registrar>;
}

void TensorMaker::parameter(torch::nn::Module& module, const std::string& name,
                            at::Tensor& member) {
  if (!member.defined() || !member.is_meta()) return;
  at::Tensor& made = made_[member.unsafeGetTensorImpl()];
  if (!made.defined()) {
    const at::NoGradGuard no_grad;
    made = at::empty_like(member, member.options().device(device_))
               .set_requires_grad(member.requires_grad());
  }
  DT_CHECK(Registry::parameter(module, name).is_same(member),
           "{} of {} is not the registered tensor", name, module.name());
  Registry::parameter(module, name) = made;
  member = made;
}

void TensorMaker::buffer(torch::nn::Module& module, const std::string& name, at::Tensor& member,
                         const at::Tensor& value) {
  DT_CHECK(Registry::buffer(module, name).is_same(member), "{} of {} is not the registered tensor",
           name, module.name());
  Registry::buffer(module, name) = value.to(device_);
  member = Registry::buffer(module, name);
}

void materialize(torch::nn::Module& root, at::Device device) {
  TensorMaker maker(device);
  root.apply([&](torch::nn::Module& module) {
    if (auto* able = dynamic_cast<Materializable*>(&module)) able->materialize(maker);
  });
  for (const auto& item : root.named_parameters())
    if (item.value().is_meta())
      raise<ConfigError>(
          "parameter {} is still on the meta device: its module cannot materialize it", item.key());
  for (const auto& item : root.named_buffers())
    if (item.value().is_meta())
      raise<ConfigError>("buffer {} is still on the meta device: its module cannot rebuild it",
                         item.key());
}

}  // namespace dovetail::ops
