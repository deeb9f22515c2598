// Root-mean-square norm over the last dimension: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and
// Sennrich 2019). Computed in fp32 whatever the dtype of x and weight, rounded once. The weight
// gradient is summed over fixed blocks of rows, so its bits do not depend on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "dovetail/ops/materialize.h"

namespace dovetail::ops {

// x [..., n] and weight [n], both fp32 or both bf16. Differentiable twice.
at::Tensor rms_normalize(const at::Tensor& x, const at::Tensor& weight, double eps);

class RMSNorm : public torch::nn::Module, public Materializable {
 public:
  // Values are uninitialised until reset_parameters or a load.
  RMSNorm(int64_t dim, double eps, const at::TensorOptions& options = {});
  at::Tensor forward(const at::Tensor& x) { return rms_normalize(x, weight, eps_); }
  void materialize(TensorMaker& maker) override { maker.parameter(*this, "weight", weight); }

  at::Tensor weight;

 private:
  double eps_;
};

}  // namespace dovetail::ops
