// Orthogonalisation of a matrix by the Newton-Schulz iteration of Muon (Jordan et al., "Muon: An optimizer for hidden
// layers in neural networks", 2024): with X = G / |G| and m <= n rows and columns (a tall matrix is transposed),
//
//   A = X X^T,  B = b A + c A A,  X <- a X + B X      (k times)
//
// brings the singular values near 1. Operands are bf16, sums fp32, and every product is rounded to bf16 once; the norm
// is fp32. A and B are symmetric: one half of each is computed.
//
// Products of bf16 values are exact in fp32, so the two ways to compute give the same mathematics: with the CPU's bf16
// products, or (where it has none) in fp32 on values that are bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dovetail {

struct NewtonSchulz {
  double a = 3.4445, b = -4.7750, c = 2.0315;
  int steps = 5;
};

enum class Bf16Products : uint8_t { native, widened };
Bf16Products bf16_products();  // the faster of the two on this machine

// Bytes of scratch for a matrix of this size, either way.
int64_t newton_schulz_workspace(int64_t rows, int64_t columns);
// Floating-point operations, with the symmetric halves counted once.
double newton_schulz_flops(int64_t rows, int64_t columns, int steps);

// Replaces the rows x columns matrix at `data` (row r at data + r*stride) by its orthogonalised form, whose values are
// bf16. The result does not depend on the matrix's scale, as far as its values are normal numbers, and not on where it
// lies. A matrix of zeros stays one; one with a NaN or infinity becomes NaN. `workspace` is 64-byte aligned.
void orthogonalize(float* data, int64_t rows, int64_t columns, int64_t stride, const NewtonSchulz& iteration,
                   std::span<std::byte> workspace, Bf16Products products = bf16_products());

}  // namespace dovetail
