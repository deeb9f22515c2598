// The three products of a linear layer, on matrices: y = x W^T + b, dx = g W, dW = g^T x, with x
// [m, in], W [out, in], b [out], g and y [m, out]. All operands of a call have one dtype, fp32 or
// bf16; sums are fp32. Any strides are taken; matrices with one contiguous dimension are read and
// written in place. m, in and out may be 0. The bits of a product do not depend on where weights and their gradients
// lie.
//
// bf16 has two paths with the same mathematics (products of bf16 values are exact in fp32). ATen's
// own is fast where the CPU multiplies bf16 (AVX512_BF16, AMX). Elsewhere the operands are widened
// to fp32 a panel at a time, so that a panel of weights is read from memory once, as bf16, and
// multiplied out of the cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "dovetail/ops/workspace.h"

namespace dovetail::ops {

enum class GemmPath { aten, widen };
// The path for bf16 on this machine.
GemmPath bf16_gemm_path();

class Matmul {
 public:
  // Scratch of the widening path comes from `workspace` (null: from the allocator).
  explicit Matmul(std::shared_ptr<Workspace> workspace = nullptr,
                  GemmPath bf16_path = bf16_gemm_path())
      : workspace_(std::move(workspace)), bf16_path_(bf16_path) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& bias) const;  // bias or undefined
  at::Tensor input_grad(const at::Tensor& g, const at::Tensor& weight) const;
  // Overwrites `out` [out, in].
  void weight_grad(const at::Tensor& g, const at::Tensor& x, const at::Tensor& out) const;

 private:
  bool widens(const at::Tensor& t) const;

  std::shared_ptr<Workspace> workspace_;
  GemmPath bf16_path_;
};

}  // namespace dovetail::ops
