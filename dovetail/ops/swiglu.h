// The gated activation of SwiGLU feed-forward blocks (Shazeer 2020), forward and backward in one
// pass each.
#pragma once

#include <ATen/core/Tensor.h>

namespace dovetail::ops {

// silu(gate) * up, element by element; equal shapes and dtype (fp32 or bf16), computed in fp32 and
// rounded once. Differentiable twice.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace dovetail::ops
