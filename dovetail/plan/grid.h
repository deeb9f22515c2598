// Where the shard boundaries of one segment lie, in units, and where a tensor may start between
// them.
#pragma once

#include <cstdint>

namespace dovetail::plan {

// A tensor to be placed. One unit = the alignment of the layout (a fixed number of elements).
struct RaggedTensor {
  int64_t extent = 0;  // length in units, >= 0
  int64_t block = 1;   // run of units, counted from the tensor's start, that no boundary may cut;
                       // the last may be short
  bool operator==(const RaggedTensor&) const = default;
};

// Boundaries at k*period + j*step for k >= 0, 0 <= j*step < period. period = the zero2 shard, step
// = the zero1 shard; one level of sharding is step == period. When step does not divide period the
// last cell is short. A tensor at x is legal when every boundary strictly inside it lies a multiple
// of its block after x.
struct Grid {
  int64_t period = 1;
  int64_t step = 1;  // 1 <= step <= period

  int64_t boundary_after(int64_t x) const {
    const int64_t base = x / period * period;
    if (step == period) return base + period;
    const int64_t inner = ((x - base) / step + 1) * step;
    return base + (inner < period ? inner : period);
  }

  // Smallest legal start >= from, -1 when there is none at all (F1 of docs/planner.md; monotone in
  // `from`).
  int64_t earliest_start(int64_t from, RaggedTensor t) const;
};

// One tensor on one grid, with the divisions that do not depend on the position done once.
class TensorOnGrid {
 public:
  TensorOnGrid(const Grid& grid, RaggedTensor tensor);

  int64_t earliest_start(int64_t from) const;  // as Grid::earliest_start
  // End of `copies` equal tensors, each at its earliest start after the one before; -1 when they
  // fit nowhere.
  int64_t end_of_run(int64_t from, int64_t copies) const;
  // Every boundary lies whole blocks from every other, and so does a neighbour's start.
  bool whole_blocks() const { return whole_blocks_; }

 private:
  // Boundaries b < b' < end are all multiples of the block away from the boundary b.
  bool crosses_cleanly(int64_t b, int64_t end) const;
  // The next cell to look at after a whole one at `cell` had no start: those alike, from which a
  // tensor would cross nothing but whole cells either, have none.
  int64_t skip_equal_cells(int64_t cell, int64_t head) const;

  Grid grid_;
  RaggedTensor tensor_;
  int64_t last_;       // offset of the last boundary inside a period
  bool divides_step_;  // block | step
  bool divides_last_;  // block | the last, possibly short, cell of a period
  bool whole_blocks_;
};

}  // namespace dovetail::plan
