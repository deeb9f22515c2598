// Dense matrices over memory of the caller's, and symmetric products computed by half.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>

#include "dovetail/base/math.h"

namespace dovetail {

// Contiguous, over `data`, which outlives it.
inline at::Tensor matrix_at(float* data, int64_t rows, int64_t columns) {
  return at::from_blob(data, {rows, columns}, at::TensorOptions(at::kFloat));
}
inline at::Tensor matrix_at(double* data, int64_t rows, int64_t columns) {
  return at::from_blob(data, {rows, columns}, at::TensorOptions(at::kDouble));
}
inline at::Tensor matrix_at(uint16_t* data, int64_t rows, int64_t columns) {
  return at::from_blob(data, {rows, columns}, at::TensorOptions(at::kBFloat16));
}

inline constexpr int64_t kTile = 32;  // of a transposition

// A symmetric n x n product is computed in panels of rows, of which only the part on one side of
// the diagonal is wanted: (1 + 1/8) / 2 of it, as smaller panels make slow products.
inline int64_t panel_rows(int64_t n) {
  constexpr int64_t kPanels = 8, kLeast = 64;
  return std::min(n, std::max(kLeast, round_up(ceil_div(n, kPanels), kLeast)));
}

// Calls panel(first row, rows).
template <class Panel>
void for_panels(int64_t n, Panel&& panel) {
  const int64_t step = panel_rows(n);
  for (int64_t r = 0; r < n; r += step) panel(r, std::min(step, n - r));
}

// Entries that panels compute: from the diagonal blocks to one side.
inline double panel_entries(int64_t n) {
  double entries = 0;
  for_panels(n, [&](int64_t r, int64_t rows) { entries += static_cast<double>(rows * (r + rows)); });
  return entries;
}

}  // namespace dovetail
