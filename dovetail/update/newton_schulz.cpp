#include "dovetail/update/newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/numerics/bf16.h"
#include "dovetail/numerics/scaling.h"
#include "dovetail/numerics/vector_clones.h"
#include "dovetail/update/dense.h"

namespace dovetail {
namespace {

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

// x = bf16(a x + y)
DT_VECTOR_CLONES void combine(float* __restrict x, const float* __restrict y, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = bf16_rounded(a * x[i] + y[i]);
}

// y = bf16(b x + c y)
DT_VECTOR_CLONES void blend(const float* __restrict x, float* __restrict y, float b, float c,
                            int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = bf16_rounded(b * x[i] + c * y[i]);
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

// Calls panel(first row, rows) for the panels of a symmetric m x m matrix at `data`: it has to fill
// these rows from the diagonal on. What lies left of it is copied from above.
template <class T, class Panel>
void symmetric(T* data, int64_t m, Panel&& panel) {
  for_panels(m, [&](int64_t r, int64_t n) {
    panel(r, n);
    if (r + n < m)
      transpose(data + r * m + r + n, n, m - r - n, m, data + (r + n) * m + r, m);
  });
}

// The iteration on X [m, n] in fp32 memory with bf16 values; Y [m, n], A and B [m, m] are scratch.
void iterate_widened(float* x, float* y, float* a, float* b, int64_t m, int64_t n,
                     const NewtonSchulz& k) {
  const at::Tensor tx = matrix_at(x, m, n), ta = matrix_at(a, m, m);
  at::Tensor ty = matrix_at(y, m, n), tb = matrix_at(b, m, m);
  const auto fb = static_cast<float>(k.b), fc = static_cast<float>(k.c),
             fa = static_cast<float>(k.a);
  for (int i = 0; i < k.steps; ++i) {
    symmetric(a, m, [&](int64_t r, int64_t rows) {
      at::Tensor out = ta.narrow(0, r, rows).narrow(1, r, m - r);
      at::mm_out(out, tx.narrow(0, r, rows), tx.narrow(0, r, m - r).t());
      for (int64_t j = r; j < r + rows; ++j) round_to_bf16({a + j * m + r, static_cast<size_t>(m - r)});
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
  const at::Tensor ta = matrix_at(a, m, m), tb = matrix_at(b, m, m);
  at::Tensor from = matrix_at(x, m, n), to = matrix_at(y, m, n);
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
  const double half = panel_entries(std::min(rows, columns));  // of A and of B
  return steps * (2 * half * n + 2 * half * m + 2 * m * m * n);
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

  uint32_t most = 0;
  for (int64_t r = 0; r < rows; ++r)
    most = std::max(most, largest_magnitude_bits(data + r * stride, 1, columns));
  if (most >= kInfinityBits) {
    for (int64_t r = 0; r < rows; ++r)
      std::fill_n(data + r * stride, columns, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  if (most == 0) return;
  // Into y as it lies, scaled by a power of two: exact, and no square under- or overflows.
  const double unit = std::ldexp(1.0, -std::ilogb(std::bit_cast<float>(most)));
  for (int64_t r = 0; r < rows; ++r)
    scale_into(data + r * stride, 1, unit, columns, y + r * columns);
  scale_into(y, 1, 1 / std::sqrt(sum_of_squares(y, m * n)), m * n, y);
  round_to_bf16({y, static_cast<size_t>(m * n)});
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
