// Where a parameter's gradient goes. The engine hands a sink to modules that can write their weight gradient themselves
// (ops::Linear, ops::Embedding), so that the kernel's output is the engine's gradient buffer: no copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace dovetail::ops {

// Belongs to one parameter; used by the backward pass of one rank.
class GradientSink {
 public:
  virtual ~GradientSink() = default;

  struct Target {
    at::Tensor view;  // the parameter's shape and dtype, inside the gradient buffer; may be strided (param transposed)
    bool fresh;       // true: holds rubbish, overwrite all of it; false: holds an earlier contribution, add to it
  };
  // The place for the next contribution of this backward pass, which the caller must write whole before anything else
  // asks. Empty where the gradient cannot be written directly now (graph of the backward wanted, parameter frozen, no
  // engine): the caller then returns an ordinary gradient to autograd.
  virtual std::optional<Target> next_contribution() = 0;
};

}  // namespace dovetail::ops
