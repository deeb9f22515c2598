#include "dovetail/plan/grid.h"

#include <algorithm>

namespace dovetail::plan {

TensorOnGrid::TensorOnGrid(const Grid& grid, RaggedTensor tensor)
    : grid_(grid),
      tensor_(tensor),
      last_((grid.period - 1) / grid.step * grid.step),
      divides_step_(grid.step % tensor.block == 0),
      divides_last_((grid.period - last_) % tensor.block == 0),
      whole_blocks_(divides_step_ && divides_last_ && tensor.extent % tensor.block == 0) {}

bool TensorOnGrid::crosses_cleanly(int64_t b, int64_t end) const {
  if (divides_step_ && divides_last_) return true;
  if (last_ == 0) return b + grid_.period >= end;
  // Two distances between neighbours exist: `step`, and the last cell of a period.
  const int64_t base = b / grid_.period * grid_.period;
  if (base + last_ > b && b + grid_.step < end && !divides_step_) return false;
  const int64_t next_period = base + grid_.period;
  if (next_period >= end) return true;
  return divides_last_ && (next_period + grid_.step >= end || divides_step_);
}

int64_t TensorOnGrid::skip_equal_cells(int64_t cell, int64_t head) const {
  const int64_t base = cell / grid_.period * grid_.period;
  if (head == 0) return std::max(base + last_, cell + grid_.step);
  const int64_t span =
      grid_.step - head + tensor_.extent;  // from a cell's start to the end of what starts in it
  if (cell - base + span > last_) return cell + grid_.step;
  return base + ((last_ - span) / grid_.step + 1) * grid_.step;
}

int64_t TensorOnGrid::earliest_start(int64_t from) const {
  const auto [extent, block] = tensor_;
  // It would cross every distance between boundaries.
  if (extent > 2 * grid_.period && !(divides_step_ && divides_last_)) return -1;
  // Within one cell every start that crosses its end must lie whole blocks before it, and the
  // earliest of those crosses the fewest boundaries. Cells repeat after one period, so two periods
  // decide.
  for (int64_t low = from; low < from + 2 * grid_.period;) {
    const int64_t b = grid_.boundary_after(low);
    const int64_t room = b - low;
    if (extent <= room) return low;
    const int64_t head = room - room % block;
    if (head > 0 && crosses_cleanly(b, b - head + extent)) return b - head;
    low = room == grid_.step ? skip_equal_cells(low, head) : b;
  }
  return -1;
}

int64_t TensorOnGrid::end_of_run(int64_t from, int64_t copies) const {
  for (int64_t end = from;; --copies) {
    if (copies == 0) return end;
    // From here every cut falls on a block edge.
    if (whole_blocks_ && end % tensor_.block == 0) return end + copies * tensor_.extent;
    const int64_t x = earliest_start(end);
    if (x < 0) return -1;
    end = x + tensor_.extent;
  }
}

int64_t Grid::earliest_start(int64_t from, RaggedTensor t) const {
  return TensorOnGrid(*this, t).earliest_start(from);
}

}  // namespace dovetail::plan
