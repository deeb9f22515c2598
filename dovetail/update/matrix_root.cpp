#include "dovetail/update/matrix_root.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/base/philox.h"
#include "dovetail/numerics/vector_clones.h"
#include "dovetail/update/dense.h"

namespace dovetail {
namespace {

constexpr int64_t kProbes = 4;
constexpr double kMostResidual = 1e-2;
constexpr double kMostNegative = 1e-4;  // eigenvalue, of the largest: beyond roundings of fp32 sums

// Hands out parts of a workspace, each 64-byte aligned.
class Parts {
 public:
  explicit Parts(std::span<std::byte> memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t n) {
    const int64_t bytes = round_up(n * static_cast<int64_t>(sizeof(T)), 64);
    DT_CHECK_LE(used_ + bytes, std::ssize(memory_), "workspace of a matrix root");
    std::byte* part = memory_.data() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(part);
  }

 private:
  std::span<std::byte> memory_;
  int64_t used_ = 0;
};

DT_VECTOR_CLONES void blend(float* __restrict sum, const float* __restrict product, float keep,
                            float gain, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = keep * sum[i] + gain * product[i];
}

// Columns are read from the triangle, whose rows lie at uneven distances: those of the whole matrix
// are often a power of two apart and share few lines of the cache.
template <class T>
void expand(std::span<const float> triangle, int64_t n, T* whole) {
  for (int64_t i = 0; i < n; ++i) {
    const float* row = triangle.data() + triangle_values(i);
    std::copy(row, row + i + 1, whole + i * n);
  }
  for (int64_t r = 0; r < n; r += kTile)
    for (int64_t c = 0; c <= r; c += kTile)
      for (int64_t j = c; j < std::min(n, c + kTile); ++j)
        for (int64_t i = std::max(r, j + 1); i < std::min(n, r + kTile); ++i)
          whole[j * n + i] = triangle[triangle_values(i) + j];
}

// n x kProbes signs, the same in every call.
void fill_probes(double* z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = philox({static_cast<uint32_t>(i), 0, 0, 0}, {0, 0})[0];
    for (int64_t p = 0; p < kProbes; ++p) z[i * kProbes + p] = (bits >> p & 1) != 0 ? 1 : -1;
  }
}

// |X^order (A / lambda + shift I) Z - Z| / |Z| for the root X = F F^T and the probes Z.
double residual(const at::Tensor& a, const at::Tensor& f, int order, double lambda, double shift,
                Parts& parts) {
  const int64_t n = a.size(0), values = n * kProbes;
  double* z = parts.take<double>(values);
  double* y = parts.take<double>(values);
  fill_probes(z, n);
  at::Tensor ty = matrix_at(y, n, kProbes), half = matrix_at(parts.take<double>(values), n, kProbes);
  at::mm_out(ty, a, matrix_at(z, n, kProbes));
  for (int64_t i = 0; i < values; ++i) y[i] = y[i] / lambda + shift * z[i];
  for (int k = 0; k < order; ++k) {
    at::mm_out(half, f.t(), ty);
    at::mm_out(ty, f, half);
  }
  double sum = 0;
  for (int64_t i = 0; i < values; ++i) sum += (y[i] - z[i]) * (y[i] - z[i]);
  return std::sqrt(sum / static_cast<double>(values));
}

}  // namespace

void add_gram(Gram gram, const float* h, int64_t rows, int64_t columns, float keep, float gain,
              std::span<float> triangle, std::span<std::byte> workspace) {
  const int64_t n = gram == Gram::of_rows ? rows : columns;
  DT_CHECK_EQ(std::ssize(triangle), triangle_values(n), "values of a triangle");
  const at::NoGradGuard no_grad;
  const at::Tensor whole = matrix_at(const_cast<float*>(h), rows, columns);  // only read
  const at::Tensor a = gram == Gram::of_rows ? whole : whole.t();
  float* product = Parts(workspace).take<float>(panel_rows(n) * n);
  for_panels(n, [&](int64_t r, int64_t count) {
    const int64_t width = r + count;
    at::Tensor panel = matrix_at(product, count, width);
    at::mm_out(panel, a.narrow(0, r, count), a.narrow(0, 0, width).t());
    for (int64_t i = r; i < width; ++i)
      blend(triangle.data() + triangle_values(i), product + (i - r) * width, keep, gain, i + 1);
  });
}

int64_t gram_workspace(int64_t n) {
  return round_up(panel_rows(n) * n * static_cast<int64_t>(sizeof(float)), 64);
}

double gram_flops(int64_t n, int64_t inner) {
  return 2 * panel_entries(n) * static_cast<double>(inner);
}

void expand_triangle(std::span<const float> triangle, int64_t n, float* whole) {
  DT_CHECK_EQ(std::ssize(triangle), triangle_values(n), "values of a triangle");
  expand(triangle, n, whole);
}

std::optional<double> inverse_root(std::span<const float> a, int64_t n, int order, double epsilon,
                                   std::span<float> root, std::span<std::byte> workspace) {
  DT_CHECK_EQ(std::ssize(a), triangle_values(n), "values of a triangle");
  DT_CHECK_EQ(root.size(), a.size(), "values of a root and its matrix");
  if (n == 0 || !std::all_of(a.begin(), a.end(), [](float x) { return std::isfinite(x); }))
    return {};
  const at::NoGradGuard no_grad;
  Parts parts(workspace);
  double* whole = parts.take<double>(n * n);
  expand(a, n, whole);
  const at::Tensor matrix_a = matrix_at(whole, n, n);
  at::Tensor values, f;
  try {
    std::tie(values, f) = at::linalg_eigh(matrix_a);
  } catch (const c10::LinAlgError&) {
    return {};
  }

  // Ascending. X = V D V^T = F F^T with F = V sqrt(D).
  const double* eigenvalue = values.const_data_ptr<double>();
  const double lambda = eigenvalue[n - 1];
  if (!(lambda > 0 && std::isfinite(lambda))) return {};
  const double negative = std::max(-eigenvalue[0] / lambda, 0.0), shift = negative + epsilon;
  if (negative > kMostNegative) return {};
  double* factor = parts.take<double>(n);
  for (int64_t i = 0; i < n; ++i)
    factor[i] = std::pow(eigenvalue[i] / lambda + shift, -0.5 / order);
  f.mul_(matrix_at(factor, 1, n));
  if (!(residual(matrix_a, f, order, lambda, shift, parts) <= kMostResidual)) return {};

  double* product = parts.take<double>(panel_rows(n) * n);
  for_panels(n, [&](int64_t r, int64_t count) {
    const int64_t width = r + count;
    at::Tensor panel = matrix_at(product, count, width);
    at::mm_out(panel, f.narrow(0, r, count), f.narrow(0, 0, width).t());
    for (int64_t i = r; i < width; ++i) {
      const double* row = product + (i - r) * width;
      std::transform(row, row + i + 1, root.data() + triangle_values(i),
                     [](double x) { return static_cast<float>(x); });
    }
  });
  return lambda;
}

int64_t inverse_root_workspace(int64_t n) {
  const auto part = [](int64_t values) {
    return round_up(values * static_cast<int64_t>(sizeof(double)), 64);
  };
  return part(n * n) + part(n) + 3 * part(n * kProbes) + part(panel_rows(n) * n);
}

double inverse_root_flops(int64_t n) {
  // Reduction to tridiagonal form 4/3 n^3, its decomposition at most 4 n^3 and the way back 2 n^3
  // (Golub and Van Loan, "Matrix Computations"), taken for 9 n^3; then F F^T. In fp64: twice.
  const auto x = static_cast<double>(n);
  return 2 * (9 * x * x * x + gram_flops(n, n));
}

}  // namespace dovetail
