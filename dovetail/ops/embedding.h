// A table of rows looked up by index, whose gradient is summed straight into the place that a
// GradientSink names. The rows that one index collects are added in fp32, in the order of their
// positions, and rounded once.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "dovetail/ops/gradient_sink.h"
#include "dovetail/ops/materialize.h"

namespace dovetail::ops {

// indices (int64, any shape) -> rows of weight [vocabulary, dim] (fp32 or bf16). Throws ConfigError
// for an index outside [0, vocabulary), naming it; there is no padding index.
at::Tensor embedding_rows(const at::Tensor& indices, const at::Tensor& weight,
                          const std::shared_ptr<GradientSink>& sink = nullptr);

class Embedding : public torch::nn::Module, public SinkUser, public Materializable {
 public:
  static constexpr bool kBackwardNeedsParameters = false;  // see ops::Unit

  // Values are uninitialised until reset_parameters or a load.
  Embedding(int64_t vocabulary, int64_t dim, const at::TensorOptions& options = {});
  at::Tensor forward(const at::Tensor& indices) { return embedding_rows(indices, weight, sink_); }

  std::vector<at::Tensor> sink_parameters() const override { return {weight}; }
  void set_sink(const at::Tensor& param, std::shared_ptr<GradientSink> sink) override;
  void materialize(TensorMaker& maker) override { maker.parameter(*this, "weight", weight); }

  at::Tensor weight;

 private:
  std::shared_ptr<GradientSink> sink_;
};

}  // namespace dovetail::ops
