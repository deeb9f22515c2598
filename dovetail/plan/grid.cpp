#include "dovetail/plan/grid.h"

namespace dovetail::plan {

bool Grid::crosses_cleanly(int64_t b, int64_t end, int64_t block) const {
  if (block == 1) return true;
  if (step == period) return b + period >= end || period % block == 0;
  // Two distances between neighbours exist: `step`, and the last cell of a period.
  const int64_t next_period = b / period * period + period;
  const int64_t last = (period - 1) / step * step;
  if (next_period - period + last > b && b + step < end && step % block != 0) return false;
  if (next_period >= end) return true;
  if ((period - last) % block != 0) return false;
  return next_period + step >= end || step % block == 0;
}

int64_t Grid::earliest_start(int64_t from, RaggedTensor t) const {
  // Within one cell every start that crosses its end must lie whole blocks before it, and the
  // earliest of those crosses the fewest boundaries. Cells repeat after one period, so two periods
  // decide.
  if (t.extent > 2 * period && (period % t.block != 0 || step % t.block != 0))
    return -1;  // crosses every distance
  for (int64_t low = from; low < from + 2 * period;) {
    const int64_t b = boundary_after(low);
    const int64_t room = b - low;
    if (t.extent <= room) return low;
    const int64_t head = room - room % t.block;
    if (head > 0 && crosses_cleanly(b, b - head + t.extent, t.block)) return b - head;
    low = b;
  }
  return -1;
}

int64_t Grid::end_of_run(int64_t from, RaggedTensor t, int64_t copies) const {
  const bool whole_blocks = period % t.block == 0 && step % t.block == 0 && t.extent % t.block == 0;
  for (int64_t end = from;; --copies) {
    if (copies == 0) return end;
    if (whole_blocks && end % t.block == 0)
      return end + copies * t.extent;  // every cut falls on a block edge
    const int64_t x = earliest_start(end, t);
    if (x < 0) return -1;
    end = x + t.extent;
  }
}

}  // namespace dovetail::plan
