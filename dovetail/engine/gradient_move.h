// A copy of a large gradient that is freed next.
#pragma once

#include <ATen/core/Tensor.h>

namespace dovetail::engine_detail {

// Copies `gradient` into `target` and gives its pages back as they were copied, so that both never exist whole.
// false, and nothing done: small, of another dtype or layout, or read by others than the caller and autograd, which
// holds it as `given`.
bool move_gradient(const at::Tensor& gradient, const at::Tensor& given, const at::Tensor& target);

}  // namespace dovetail::engine_detail
