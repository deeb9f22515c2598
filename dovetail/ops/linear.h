// A linear layer whose weight gradient is written by the matrix product itself into the place that
// a GradientSink names. Names and shapes are those of torch::nn::Linear: weight [out, in], bias
// [out] or none.
//
// Forward saves x and the weight parameter itself, never a copy: whoever rebinds the parameter's
// memory between forward and backward is obeyed. Under create_graph the gradients are
// differentiable and sinks are left alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "dovetail/ops/gradient_sink.h"
#include "dovetail/ops/materialize.h"
#include "dovetail/ops/matmul.h"

namespace dovetail::ops {

// x [..., in] -> [..., out]. `bias` may be undefined, `sink` null. Throws ConfigError on shapes or
// dtypes that differ.
at::Tensor linear_layer(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                        const Matmul& matmul = Matmul(),
                        const std::shared_ptr<GradientSink>& sink = nullptr);

class Linear : public torch::nn::Module, public SinkUser, public Materializable {
 public:
  // Values are uninitialised until reset_parameters or a load.
  Linear(int64_t in, int64_t out, bool with_bias = true, const at::TensorOptions& options = {});
  // Shares `weight` with another module (a tied head); no bias.
  explicit Linear(const at::Tensor& weight);

  at::Tensor forward(const at::Tensor& x);
  void set_workspace(const std::shared_ptr<Workspace>& workspace) { matmul_ = Matmul(workspace); }

  std::vector<at::Tensor> sink_parameters() const override { return {weight}; }
  void set_sink(const at::Tensor& param, std::shared_ptr<GradientSink> sink) override;
  void materialize(TensorMaker& maker) override;

  at::Tensor weight, bias;  // bias is undefined where there is none

 private:
  Matmul matmul_;
  std::shared_ptr<GradientSink> sink_;
};

}  // namespace dovetail::ops
