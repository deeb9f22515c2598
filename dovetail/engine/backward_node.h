// An identity in the autograd graph that tells when the backward pass has gone through it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>

namespace dovetail::engine_detail {

// Replaces each tensor by itself behind one common node; `then` runs, in every backward pass, once
// the gradients of all of them that the pass needs have been computed.
void see_backward(std::span<at::Tensor* const> tensors, std::function<void()> then);

}  // namespace dovetail::engine_detail
