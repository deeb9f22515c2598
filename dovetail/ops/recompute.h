// Activation recomputation: a function runs once without saving activations and again in the
// backward pass, where its gradients are then taken by a backward pass of its own (reentrant).
//
//   outputs = ops::recompute([&](const Tensors& in) { return Tensors{block.forward(in[0])}; }, {x},
//   block_trains);
//
// - Tensors that the function reads besides its inputs (parameters) get their gradients as usual,
// by accumulation, and
//   need hold their bytes only while the function runs.
// - Where the function draws from torch's default CPU generator it draws the same numbers again,
// and the generator goes on
//   from where it was. A generator of the function's own is the function's business.
// - The backward pass must accumulate (backward()); under autograd::grad or create_graph it throws
// StateError.
// - The inner backward pass is a graph task of its own: callbacks queued in it run at its end.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace dovetail::ops {

using Tensors = std::vector<at::Tensor>;
using TensorFunction = std::function<Tensors(const Tensors&)>;

// `trains`: whether the function reads a parameter that requires a gradient, so that its outputs do
// even where no input does. Without grad mode the function is simply called. Outputs that are not
// floating point take no part in backward.
Tensors recompute(TensorFunction function, const Tensors& inputs, bool trains);

}  // namespace dovetail::ops
