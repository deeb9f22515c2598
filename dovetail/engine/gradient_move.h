// The copy of a gradient that autograd hands over into the engine's buffer.
#pragma once

#include <ATen/core/Tensor.h>

namespace dovetail::engine_detail {

// Copies `gradient` into `target`, of the same shape. A large one that nobody reads but the caller and autograd, which
// holds it as `given`, gives its pages back as they were copied, so that both never exist whole.
void move_gradient(const at::Tensor& gradient, const at::Tensor& given, const at::Tensor& target);

}  // namespace dovetail::engine_detail
