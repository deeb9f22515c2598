// What the trainer knows of a model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "dovetail/layout/tensor_spec.h"
#include "dovetail/ops/cross_entropy.h"

namespace dovetail::models {

class Model {
 public:
  virtual ~Model() = default;

  // The root module, an ops::Unit; its blocks are units too.
  virtual torch::nn::Module& module() = 0;
  // Sets every parameter and buffer from the seed alone: the same on every rank, in any dtype up to
  // its rounding.
  virtual void reset_parameters(uint64_t seed) = 0;

  // tokens and targets [batch, length] int64; targets equal to -100 take no part.
  virtual ops::LossSum loss(const at::Tensor& tokens, const at::Tensor& targets) = 0;
  // [batch, length, vocabulary]
  virtual at::Tensor logits(const at::Tensor& tokens) = 0;

  // Kind and heads of each parameter, by the names of module().named_parameters(); a shared
  // parameter appears once, under its first name.
  virtual std::vector<TensorSpec> specs() const = 0;
  virtual int64_t vocabulary() const = 0;
  virtual int64_t context() const = 0;  // longest sequence
  // Multiplications and additions of forward and backward for one token of a sequence of that
  // length.
  virtual double flops_per_token(int64_t length) const = 0;
};

}  // namespace dovetail::models
