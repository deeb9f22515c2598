// Inverse roots of symmetric positive semidefinite matrices, and the products that such matrices
// are summed from.
//
// Symmetric matrices are kept as their lower triangles, row by row: entry (i, j) with j <= i is
// value i*(i+1)/2 + j. That is half the memory, and what is read back is symmetric to the bit.
//
// Workspaces are 64-byte aligned. Operands of products lie there or in memory of ATen's, so that
// results do not depend on where a triangle lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace dovetail {

// Values of the triangle of an n x n matrix, and the number of its row n's first value.
constexpr int64_t triangle_values(int64_t n) { return n * (n + 1) / 2; }

// Which product of a rows x columns matrix H: H H^T, rows x rows, or H^T H, columns x columns.
enum class Gram : uint8_t { of_rows, of_columns };

// triangle <- keep * triangle + gain * product, in fp32; not much more than the lower half of the
// product is computed. `h` is packed and 64-byte aligned.
void add_gram(Gram gram, const float* h, int64_t rows, int64_t columns, float keep, float gain,
              std::span<float> triangle, std::span<std::byte> workspace);
int64_t gram_workspace(int64_t n);                  // bytes, for an n x n product
double gram_flops(int64_t n, int64_t inner);        // of an n x n product of sums of `inner` terms

// The whole n x n matrix, packed.
void expand_triangle(std::span<const float> triangle, int64_t n, float* whole);

// With lambda the largest eigenvalue of A, and negative = -(the smallest) / lambda where that is
// below 0, a rounding of 0:
//
//   root <- (A / lambda + (negative + epsilon) I)^(-1/order)
//
// from A's eigenvalues and eigenvectors in fp64. Its entries are at most epsilon^(-1/order).
//
// Returns lambda. Returns nothing, and leaves `root` as it was, where there is no root to rely on:
// A is zero, not finite or clearly not semidefinite (negative above 1e-4), LAPACK finds no
// decomposition, or the root X, in fp64, does not satisfy X^order (A / lambda + ..) z = z within
// 1 % for probes z of random signs. The error of the latter is near 1e-16 / (the smallest
// eigenvalue of what the root is taken of): a singular A needs an epsilon of 1e-13 or more.
std::optional<double> inverse_root(std::span<const float> a, int64_t n, int order, double epsilon,
                                   std::span<float> root, std::span<std::byte> workspace);
int64_t inverse_root_workspace(int64_t n);  // bytes
double inverse_root_flops(int64_t n);

}  // namespace dovetail
