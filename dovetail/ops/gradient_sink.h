// Where a parameter's gradient goes. The engine hands a sink to modules that can write their weight
// gradient themselves (ops::Linear, ops::Embedding), so that the kernel's output is the engine's
// gradient buffer: no copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace dovetail::ops {

// Belongs to one parameter; used by the backward pass of one rank.
class GradientSink {
 public:
  virtual ~GradientSink() = default;

  struct Target {
    // the parameter's shape and dtype, inside the gradient buffer; may be strided (param transposed)
    at::Tensor view;
    bool fresh;       // true: holds rubbish, overwrite all of it; false: holds an earlier contribution, add to it
  };
  // The place for the next contribution of this backward pass, which the caller must write whole before anything else
  // asks. Empty where the gradient cannot be written directly now (graph of the backward wanted, parameter frozen, no
  // engine): the caller then returns an ordinary gradient to autograd.
  // few_rows: the caller adds to few rows of it; the target is never fresh then, a first contribution finds zeros in
  // memory that takes no pages where it is not written.
  virtual std::optional<Target> next_contribution(bool few_rows = false) = 0;
};

// A module that can write gradients of its own parameters (not its children's) directly. Found by dynamic_cast over
// modules(); a parameter that several modules share is listed by each, and each is given the same sink.
class SinkUser {
 public:
  virtual ~SinkUser() = default;
  virtual std::vector<at::Tensor> sink_parameters() const = 0;
  // From now on the gradient of `param`, one of sink_parameters(), goes to `sink`; null takes the
  // sink away. Takes effect for forwards that follow: a graph keeps the sink that its forward saw.
  // Throws StateError for any other tensor.
  virtual void set_sink(const at::Tensor& param, std::shared_ptr<GradientSink> sink) = 0;
};

}  // namespace dovetail::ops
