#include "dovetail/update/newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/numerics/bf16.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr int64_t kPanels = 8;       // of a symmetric product: (1 + 1/8) / 2 of it are computed
constexpr int64_t kLeastPanel = 64;  // rows; smaller ones make slow products
constexpr int64_t kTile = 32;        // of a transposition

int64_t panel_rows(int64_t m) {
  return std::max(kLeastPanel, round_up(ceil_div(m, kPanels), kLeastPanel));
}

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

DT_VECTOR_CLONES float largest(const float* x, int64_t n) {
  float most[16] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::fabs(x[i]);
    most[i % 16] = v > most[i % 16] ? v : most[i % 16];
  }
  return *std::max_element(most, most + 16);
}

// In lanes that do not depend on the vector width.
DT_VECTOR_CLONES double squares(const float* x, int64_t n) {
  double lane[16] = {};
  for (int64_t i = 0; i < n; ++i) {
    const auto v = static_cast<double>(x[i]);
    lane[i % 16] += v * v;
  }
  double sum = 0;
  for (double l : lane) sum += l;
  return sum;
}

DT_VECTOR_CLONES void scale_into(const float* x, int64_t n, float first, float second, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * first * second;
}

inline float round_one(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;  // of finite values; others never come here
  std::memcpy(&v, &u, 4);
  return v;
}

DT_VECTOR_CLONES void round_all(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = round_one(x[i]);
}

// x = bf16(a x + y)
DT_VECTOR_CLONES void combine(float* __restrict x, const float* __restrict y, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = round_one(a * x[i] + y[i]);
}

// y = bf16(b x + c y)
DT_VECTOR_CLONES void blend(const float* __restrict x, float* __restrict y, float b, float c,
                            int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = round_one(b * x[i] + c * y[i]);
}

template <class T>
void transpose(const T* from, int64_t rows, int64_t columns, int64_t from_stride, T* to,
               int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += kTile)
    for (int64_t c = 0; c < columns; c += kTile)
      for (int64_t i = r; i < std::min(rows, r + kTile); ++i)
        for (int64_t j = c; j < std::min(columns, c + kTile); ++j)
          to[j * to_stride + i] = from[i * from_stride + j];
}

at::Tensor matrix(void* data, int64_t rows, int64_t columns, at::ScalarType type) {
  return at::from_blob(data, {rows, columns}, at::TensorOptions(type));
}

// Calls panel(first row, rows) for the panels of a symmetric m x m matrix at `data`: it has to fill
// these rows from the diagonal on. What lies left of it is copied from above.
template <class T, class Panel>
void symmetric(T* data, int64_t m, Panel&& panel) {
  const int64_t step = panel_rows(m);
  for (int64_t r = 0; r < m; r += step) {
    const int64_t n = std::min(step, m - r);
    panel(r, n);
    if (r + n < m) transpose(data + r * m + r + n, n, m - r - n, m, data + (r + n) * m + r, m);
  }
}

// The iteration on X [m, n] in fp32 memory with bf16 values; Y [m, n], A and B [m, m] are scratch.
void iterate_widened(float* x, float* y, float* a, float* b, int64_t m, int64_t n,
                     const NewtonSchulz& k) {
  const at::Tensor tx = matrix(x, m, n, at::kFloat), ta = matrix(a, m, m, at::kFloat);
  at::Tensor ty = matrix(y, m, n, at::kFloat), tb = matrix(b, m, m, at::kFloat);
  const auto fb = static_cast<float>(k.b), fc = static_cast<float>(k.c),
             fa = static_cast<float>(k.a);
  for (int i = 0; i < k.steps; ++i) {
    symmetric(a, m, [&](int64_t r, int64_t rows) {
      at::Tensor out = ta.narrow(0, r, rows).narrow(1, r, m - r);
      at::mm_out(out, tx.narrow(0, r, rows), tx.narrow(0, r, m - r).t());
      for (int64_t j = r; j < r + rows; ++j) round_all(a + j * m + r, m - r);
    });
    symmetric(b, m, [&](int64_t r, int64_t rows) {
      at::Tensor out = tb.narrow(0, r, rows).narrow(1, r, m - r);
      at::mm_out(out, ta.narrow(0, r, rows), ta.narrow(1, r, m - r));
      for (int64_t j = r; j < r + rows; ++j) blend(a + j * m + r, b + j * m + r, fb, fc, m - r);
    });
    at::mm_out(ty, tb, tx);
    combine(x, y, fa, m * n);
  }
}

// The same on bf16 memory.
void iterate_native(uint16_t* x, uint16_t* y, uint16_t* a, uint16_t* b, int64_t m, int64_t n,
                    const NewtonSchulz& k) {
  const at::Tensor ta = matrix(a, m, m, at::kBFloat16), tb = matrix(b, m, m, at::kBFloat16);
  at::Tensor from = matrix(x, m, n, at::kBFloat16), to = matrix(y, m, n, at::kBFloat16);
  for (int i = 0; i < k.steps; ++i) {
    symmetric(a, m, [&](int64_t r, int64_t rows) {
      at::Tensor out = ta.narrow(0, r, rows).narrow(1, r, m - r);
      at::mm_out(out, from.narrow(0, r, rows), from.narrow(0, r, m - r).t());
    });
    symmetric(b, m, [&](int64_t r, int64_t rows) {
      at::Tensor out = tb.narrow(0, r, rows).narrow(1, r, m - r);
      const at::Tensor own = ta.narrow(0, r, rows).narrow(1, r, m - r);
      at::addmm_out(out, own, ta.narrow(0, r, rows), ta.narrow(1, r, m - r), k.b, k.c);
    });
    at::addmm_out(to, from, tb, from, k.a, 1);
    std::swap(from, to);
  }
  if (k.steps % 2 != 0) std::memcpy(x, y, m * n * sizeof(uint16_t));
}

// Power of two that brings `most` near 1, in two factors so that neither overflows.
struct Scale {
  float first, second;
};
Scale scale_for(float most) {
  const int e = -std::ilogb(most);
  return {std::ldexp(1.0f, e / 2), std::ldexp(1.0f, e - e / 2)};
}

}  // namespace

Bf16Products bf16_products() {
  return bf16_products_in_hardware() ? Bf16Products::native : Bf16Products::widened;
}

int64_t newton_schulz_workspace(int64_t rows, int64_t columns) {
  const int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  return 2 * aligned(m * n * 4) + 2 * aligned(m * m * 4);
}

double newton_schulz_flops(int64_t rows, int64_t columns, int steps) {
  const auto m = static_cast<double>(std::min(rows, columns)),
             n = static_cast<double>(std::max(rows, columns));
  constexpr double kHalf = (1 + 1.0 / kPanels) / 2;
  return steps * (2 * m * m * n * (1 + kHalf) + 2 * m * m * m * kHalf);
}

void orthogonalize(float* data, int64_t rows, int64_t columns, int64_t stride,
                   const NewtonSchulz& k, std::span<std::byte> workspace, Bf16Products products) {
  if (rows == 0 || columns == 0) return;
  DT_CHECK_GE(static_cast<int64_t>(workspace.size()), newton_schulz_workspace(rows, columns));
  at::NoGradGuard no_grad;
  const int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  std::byte* memory = workspace.data();
  auto* x = reinterpret_cast<float*>(memory);
  auto* y = reinterpret_cast<float*>(memory + aligned(m * n * 4));
  auto* a = reinterpret_cast<float*>(memory + 2 * aligned(m * n * 4));
  auto* b = reinterpret_cast<float*>(memory + 2 * aligned(m * n * 4) + aligned(m * m * 4));

  // Into y as it lies, scaled by a power of two: exact, and no square under- or overflows.
  float most = 0;
  bool finite = true;
  for (int64_t r = 0; r < rows; ++r) {
    most = std::max(most, largest(data + r * stride, columns));
    for (int64_t c = 0; c < columns; ++c) finite &= std::isfinite(data[r * stride + c]);
  }
  if (!finite) {
    for (int64_t r = 0; r < rows; ++r)
      std::fill_n(data + r * stride, columns, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  if (most == 0) return;
  const Scale scale = scale_for(most);
  for (int64_t r = 0; r < rows; ++r)
    scale_into(data + r * stride, columns, scale.first, scale.second, y + r * columns);
  const auto inverse = static_cast<float>(1 / std::sqrt(squares(y, rows * columns)));
  scale_into(y, rows * columns, inverse, 1, y);
  round_all(y, rows * columns);
  if (rows > columns)
    transpose(y, rows, columns, columns, x, rows);
  else
    std::memcpy(x, y, m * n * sizeof(float));

  if (products == Bf16Products::widened) {
    iterate_widened(x, y, a, b, m, n, k);
  } else {
    auto* half =
        reinterpret_cast<uint16_t*>(y);  // the lower half of y's memory, x's narrowed values
    encode_bf16({x, static_cast<size_t>(m * n)}, {half, static_cast<size_t>(m * n)});
    iterate_native(half, half + m * n, reinterpret_cast<uint16_t*>(a),
                   reinterpret_cast<uint16_t*>(b), m, n, k);
    decode_bf16({half, static_cast<size_t>(m * n)}, {x, static_cast<size_t>(m * n)});
  }
  if (rows > columns) {
    transpose(x, m, n, n, y, columns);
    x = y;
  }
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(data + r * stride, x + r * columns, columns * sizeof(float));
}

}  // namespace dovetail
