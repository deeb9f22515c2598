#include "dovetail/ops/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "dovetail/base/error.h"
#include "dovetail/ops/autograd.h"

namespace dovetail::ops {
namespace {

at::Tensor as_matrix(const at::Tensor& x) { return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)}); }

// An explicit row count, because -1 is ambiguous where the last dimension is 0.
at::Tensor matrix_of(const at::Tensor& x) {
  if (x.size(-1) != 0) return as_matrix(x);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return x.reshape({rows, 0});
}

class LinearNode : public Node {
 public:
  LinearNode(const at::Tensor& x, const at::Tensor& weight, const Matmul& matmul,
             std::shared_ptr<GradientSink> sink)
      : x_sizes_(x.sizes().vec()), matmul_(matmul), sink_(std::move(sink)) {
    if (weight.requires_grad()) x_ = SavedVariable(x, false);
    if (x.requires_grad()) weight_ = SavedVariable(weight, false);
  }

  std::string name() const override { return "dovetail::LinearBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list out(3);
    if (!grads[0].defined()) return out;
    const at::Tensor g = matrix_of(grads[0]);
    if (task_should_compute_output(0)) out[0] = input_grad(g).view(x_sizes_);
    if (task_should_compute_output(1)) out[1] = weight_grad(g);
    if (task_should_compute_output(2)) out[2] = g.sum(0);
    return out;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
  }

 private:
  at::Tensor input_grad(const at::Tensor& g) {
    const at::Tensor weight = weight_.unpack();
    return at::GradMode::is_enabled() ? at::mm(g, weight) : matmul_.input_grad(g, weight);
  }

  at::Tensor weight_grad(const at::Tensor& g) {
    const at::Tensor x = matrix_of(x_.unpack());
    if (at::GradMode::is_enabled()) return at::mm(g.t(), x);
    if (sink_ && !is_captured(*this, 1)) {
      if (const auto target = sink_->next_contribution()) {
        write(g, x, *target);
        return {};
      }
    }
    at::Tensor grad = at::empty({g.size(1), x.size(1)}, g.options());
    matmul_.weight_grad(g, x, grad);
    return grad;
  }

  void write(const at::Tensor& g, const at::Tensor& x, const GradientSink::Target& target) {
    if (target.fresh) return matmul_.weight_grad(g, x, target.view);
    at::Tensor scratch = at::empty({g.size(1), x.size(1)}, g.options());
    matmul_.weight_grad(g, x, scratch);
    target.view.add_(scratch);
  }

  std::vector<int64_t> x_sizes_;
  SavedVariable x_, weight_;
  Matmul matmul_;
  std::shared_ptr<GradientSink> sink_;
};

void check_operands(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1))
    raise<ConfigError>("linear: x {} does not fit weight {} ([out, in])", c10::str(x.sizes()),
                       c10::str(weight.sizes()));
  if (x.scalar_type() != weight.scalar_type())
    raise<ConfigError>("linear: x is {}, weight is {}", c10::toString(x.scalar_type()),
                       c10::toString(weight.scalar_type()));
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0)))
    raise<ConfigError>("linear: bias {} does not fit weight {}", c10::str(bias.sizes()),
                       c10::str(weight.sizes()));
}

}  // namespace

at::Tensor linear_layer(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        const Matmul& matmul, const std::shared_ptr<GradientSink>& sink) {
  check_operands(x, weight, bias);
  at::Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    y = matmul.forward(matrix_of(x), weight, bias).view(sizes);
  }
  if (records_graph(x, weight, bias))
    record(c10::make_intrusive<LinearNode>(x, weight, matmul, sink), y, x, weight, bias);
  return y;
}

Linear::Linear(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({out, in}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

Linear::Linear(const at::Tensor& shared_weight) {
  weight = register_parameter("weight", shared_weight, shared_weight.requires_grad());
}

at::Tensor Linear::forward(const at::Tensor& x) {
  return linear_layer(x, weight, bias, matmul_, sink_);
}

void Linear::set_sink(const at::Tensor& param, std::shared_ptr<GradientSink> sink) {
  if (!param.is_same(weight))
    raise<StateError>("Linear writes the gradient of its weight only; another tensor was given");
  sink_ = std::move(sink);
}

void Linear::materialize(TensorMaker& maker) {
  maker.parameter(*this, "weight", weight);
  maker.parameter(*this, "bias", bias);
}

}  // namespace dovetail::ops
