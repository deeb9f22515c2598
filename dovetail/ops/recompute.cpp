#include "dovetail/ops/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include "dovetail/base/error.h"
#include "dovetail/ops/autograd.h"

namespace dovetail::ops {
namespace {

at::Tensor generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const at::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// While it lives the default generator repeats what followed `state`. Undefined: nothing was drawn,
// nothing is touched (other threads may be drawing).
class RepeatDraws {
 public:
  explicit RepeatDraws(const at::Tensor& state) {
    if (!state.defined()) return;
    after_ = generator_state();
    set_generator_state(state);
  }
  ~RepeatDraws() {
    if (after_.defined()) set_generator_state(after_);
  }
  RepeatDraws(const RepeatDraws&) = delete;

 private:
  at::Tensor after_;
};

class RecomputeNode : public Node {
 public:
  RecomputeNode(TensorFunction function, const Tensors& inputs) : function_(std::move(function)) {
    for (const at::Tensor& input : inputs) {
      inputs_.emplace_back(input, false);
      wants_.push_back(input.defined() && input.requires_grad());
    }
  }

  std::string name() const override { return "dovetail::RecomputeBackward"; }

  variable_list apply(variable_list&& grads) override {
    refuse_second_order("recompute");
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid())
      raise<StateError>(
          "recompute: gradients must be accumulated by backward(); autograd::grad is not possible "
          "here");
    const std::lock_guard lock(mutex_);
    Tensors inputs;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      at::Tensor input = inputs_[i].unpack();
      inputs.push_back(input.defined() ? input.detach().set_requires_grad(wants_[i]) : input);
    }
    run_backward(inputs, grads);
    variable_list out;
    for (size_t i = 0; i < inputs.size(); ++i)
      out.push_back(wants_[i] ? inputs[i].grad() : at::Tensor());
    return out;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& input : inputs_) input.reset_data();
  }

  at::Tensor
      draws;  // the generator's state before the first run; undefined where nothing was drawn
  std::vector<size_t> taken;  // which results of the function are this node's outputs, in order
  size_t results = 0;

 private:
  void run_backward(const Tensors& inputs, const variable_list& grads) {
    const at::AutoGradMode with_grad(true);
    const RepeatDraws repeat(draws);
    const Tensors again = function_(inputs);
    if (again.size() != results)
      raise<StateError>("recompute: {} outputs the first time, {} when run again", results,
                        again.size());
    Tensors roots, seeds;
    for (size_t i = 0; i < taken.size(); ++i) {
      const at::Tensor& output = again[taken[i]];
      if (!grads[i].defined() || !output.defined() || !output.requires_grad()) continue;
      if (output.sizes() != grads[i].sizes())
        raise<StateError>("recompute: output {} was {} the first time and is {} when run again",
                          taken[i], c10::str(grads[i].sizes()), c10::str(output.sizes()));
      roots.push_back(output);
      seeds.push_back(grads[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
  }

  TensorFunction function_;
  std::vector<SavedVariable> inputs_;
  std::vector<bool> wants_;
};

}  // namespace

Tensors recompute(TensorFunction function, const Tensors& inputs, bool trains) {
  bool records = trains;
  for (const at::Tensor& input : inputs) records |= input.defined() && input.requires_grad();
  if (!at::GradMode::is_enabled() || !records) return function(inputs);

  auto node = c10::make_intrusive<RecomputeNode>(function, inputs);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  const at::Tensor before = generator_state();
  Tensors outputs;
  {
    const at::NoGradGuard no_grad;
    outputs = function(inputs);
  }
  if (!at::equal(before, generator_state())) node->draws = before;
  node->results = outputs.size();
  for (size_t i = 0; i < outputs.size(); ++i) {
    at::Tensor& output = outputs[i];
    if (!output.defined() || !at::isFloatingType(output.scalar_type())) continue;
    output = output.detach();  // an input that the function hands through must keep its own history
    node->taken.push_back(i);
    attach_output(node, output);
  }
  return outputs;
}

}  // namespace dovetail::ops
