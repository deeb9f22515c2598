#include "dovetail/engine/backward_node.h"

#include <torch/csrc/autograd/custom_function.h>

namespace dovetail::engine_detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Callback : torch::CustomClassHolder {
  explicit Callback(std::function<void()> f) : call(std::move(f)) {}
  std::function<void()> call;
};

struct SeeBackward : torch::autograd::Function<SeeBackward> {
  static variable_list forward(AutogradContext* context, c10::intrusive_ptr<Callback> callback, at::TensorList inputs) {
    context->saved_data["callback"] = c10::IValue::make_capsule(std::move(callback));
    context->set_materialize_grads(false);
    return inputs.vec();
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto callback = c10::static_intrusive_pointer_cast<Callback>(context->saved_data["callback"].toCapsule());
    callback->call();
    grads.insert(grads.begin(), at::Tensor());
    return grads;
  }
};

}  // namespace

void see_backward(std::span<at::Tensor* const> tensors, std::function<void()> then) {
  variable_list inputs;
  for (at::Tensor* t : tensors) inputs.push_back(*t);
  variable_list outputs = SeeBackward::apply(c10::make_intrusive<Callback>(std::move(then)), at::TensorList(inputs));
  for (size_t i = 0; i < tensors.size(); ++i) *tensors[i] = outputs[i];
}

}  // namespace dovetail::engine_detail
