// The computation of Shampoo on one tile; the formulas stand in shampoo.h.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "dovetail/update/shampoo.h"

namespace dovetail {

// Values of "shampoo_scale": what a tile's state is a multiple of.
inline constexpr int64_t kShampooScaleValues = 4;

// Triangles of n x n matrices (matrix_root.h); n is 0 for a side that the tensor does not have.
struct ShampooSide {
  int64_t n = 0;
  std::span<float> statistics = {}, root = {};
};

// A tile and its state. Row r of a field starts at field + r * stride.
struct ShampooTile {
  int64_t rows, columns, stride;
  float* grad;                       // in: gradient before grad_scale; out: direction
  const float* graft_sq;             // read for Grafting::rmsprop
  std::array<ShampooSide, 2> sides;  // left: rows x rows; right: columns x columns
  std::span<float> scale;            // kShampooScaleValues
};

// Bits of the result depend on the contents of the tile and its state, not on where they lie.
// `workspace` has shampoo_workspace() bytes, aligned to 64.
void precondition(const ShampooOptions& options, const StepContext& context,
                  const ShampooTile& tile, WorkspaceSpan workspace);

int64_t shampoo_workspace(int64_t rows, int64_t columns);
// Per step, with the roots spread over the steps between them; `left`: whether there is that side.
double shampoo_flops(const ShampooOptions& options, int64_t rows, int64_t columns, bool left);

}  // namespace dovetail
