// Optimal shards of tiny instances from the definition alone: all starts, all orders. Shares no
// code with the planner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "dovetail/plan/ragged.h"

namespace dovetail::plan::brute {

struct Sizes {
  int64_t period, step;
};

inline bool is_boundary(int64_t x, Sizes s) { return (x % s.period) % s.step == 0; }

inline bool legal(const RaggedTensor& t, int64_t x, Sizes s) {
  for (int64_t b = x + 1; b < x + t.extent; ++b)
    if (is_boundary(b, s) && (b - x) % t.block != 0) return false;
  return true;
}

// Whether the tensors fit disjointly into [0, capacity): every start of every tensor is tried.
inline bool fits(const std::vector<RaggedTensor>& tensors, int64_t capacity, Sizes s,
                 std::vector<int64_t> starts = {}) {
  const size_t next = starts.size();
  if (next == tensors.size()) return true;
  const RaggedTensor& t = tensors[next];
  starts.push_back(0);
  for (int64_t& x = starts.back(); x + t.extent <= capacity; ++x) {
    bool free = legal(t, x, s);
    for (size_t i = 0; i < next && free; ++i)
      free = x >= starts[i] + tensors[i].extent || x + t.extent <= starts[i];
    if (free && fits(tensors, capacity, s, starts)) return true;
  }
  return false;
}

inline int64_t total(const std::vector<RaggedTensor>& tensors) {
  int64_t n = 0;
  for (const RaggedTensor& t : tensors) n += t.extent;
  return n;
}

// Least weights.zero3*S3 + weights.zero1*S1 of one segment.
inline int64_t least_cost(const RaggedProblem& p, const std::vector<RaggedTensor>& tensors) {
  const Degrees& d = p.degrees;
  const int64_t coarse = d.zero2 / d.zero3, fine = d.zero1 / d.zero2;
  if (total(tensors) == 0) return 0;
  int64_t best = -1;
  for (int64_t period = (total(tensors) + d.zero2 - 1) / d.zero2;; ++period) {
    const int64_t least = (period + fine - 1) / fine;
    const auto cost = [&](int64_t step) {
      return p.weights.zero3 * coarse * period + p.weights.zero1 * step;
    };
    if (best >= 0 && cost(least) >= best) return best;
    for (int64_t step = fine == 1 ? period : least;
         step <= period && (best < 0 || cost(step) < best); ++step)
      if (fits(tensors, d.zero2 * period, {period, step})) best = cost(step);
  }
}

// The same over all assignments of tensors to at most max_segments segments.
inline int64_t least_cost(const RaggedProblem& p) {
  std::vector<std::vector<RaggedTensor>> parts(p.max_segments);
  int64_t best = -1;
  const std::function<void(size_t)> assign = [&](size_t i) {
    if (i == p.tensors.size()) {
      int64_t cost = 0;
      for (const auto& part : parts) cost += least_cost(p, part);
      if (best < 0 || cost < best) best = cost;
      return;
    }
    for (auto& part : parts) {
      part.push_back(p.tensors[i]);
      assign(i + 1);
      part.pop_back();
      if (part.empty()) break;
    }
  };
  assign(0);
  return best;
}

}  // namespace dovetail::plan::brute
