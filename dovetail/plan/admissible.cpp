#include "dovetail/plan/admissible.h"

#include <algorithm>
#include <numeric>

#include "dovetail/base/math.h"

namespace dovetail::plan {
namespace {

constexpr int64_t kBeyond = int64_t{1} << 61;

int64_t lcm_capped(int64_t a, int64_t b) {
  const int64_t factor = a / std::gcd(a, b);
  return factor > kBeyond / b ? kBeyond : factor * b;
}

// Raises s to a multiple of the blocks of all tensors longer than cells*s, or to where the shortest
// of these stops being so.
int64_t raise_to_long_blocks(const TensorTypes& types, int64_t cells, int64_t s) {
  int64_t common = 1, shrinks_at = kBeyond;
  for (const TensorType& t : types.types) {
    if (t.shape.extent <= cells * s) continue;
    common = lcm_capped(common, t.shape.block);
    shrinks_at = std::min(shrinks_at, ceil_div(t.shape.extent, cells));
  }
  return std::min(ceil_div(s, common) > kBeyond / common ? kBeyond : round_up(s, common),
                  shrinks_at);
}

int64_t raise_to_one_cut(RaggedTensor t, int64_t s) {
  if (t.extent <= s || t.extent > 2 * s || s % t.block == 0) return s;
  const int64_t head = round_down(s, t.block);
  return std::min(std::max(s, t.extent - head), head + t.block);
}

}  // namespace

int64_t next_admissible(const TensorTypes& types, int64_t from) {
  for (int64_t s = from;;) {
    int64_t raised = raise_to_long_blocks(types, 2, s);
    for (const TensorType& t : types.types) raised = raise_to_one_cut(t.shape, raised);
    if (raised == s) return s;
    s = raised;
  }
}

int64_t next_admissible_step(const TensorTypes& types, int64_t period, int64_t from) {
  // Cells are at most `step` long, so a tensor over three of them holds two distances between
  // boundaries, one of which is `step`.
  for (int64_t s = from;;) {
    if (s >= period) return period;
    const int64_t raised = raise_to_long_blocks(types, 3, s);
    if (raised == s) return s;
    s = raised;
  }
}

}  // namespace dovetail::plan
