// Half-open ranges of element or byte indices.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <vector>

namespace dovetail {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  constexpr int64_t size() const { return end > begin ? end - begin : 0; }
  constexpr bool empty() const { return end <= begin; }
  constexpr bool contains(int64_t i) const { return begin <= i && i < end; }
  constexpr bool contains(Interval o) const { return o.empty() || (begin <= o.begin && o.end <= end); }
  constexpr Interval shifted(int64_t by) const { return {begin + by, end + by}; }
  auto operator<=>(const Interval&) const = default;
};

// The common part; {0, 0} when there is none, so that all empty intervals compare equal.
constexpr Interval intersect(Interval a, Interval b) {
  Interval r{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return r.empty() ? Interval{} : r;
}

// Sorted, disjoint and non-empty intervals.
using IntervalList = std::vector<Interval>;

inline int64_t total_size(const IntervalList& list) {
  int64_t n = 0;
  for (Interval i : list) n += i.size();
  return n;
}

}  // namespace dovetail
