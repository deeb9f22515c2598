// Sums over ranks by their definition.
#pragma once

#include <functional>
#include <vector>

namespace dovetail::comm {

// The sum over ranks of value_at(rank, i), by the definition of the tree, one element at a time.
inline float tree_value(const std::vector<int>& ranks, const std::function<float(int)>& value) {
  if (ranks.size() == 1) return value(ranks[0]);
  int bit = 1;
  while ((ranks.front() ^ ranks.back()) >= 2 * bit) bit *= 2;
  std::vector<int> low, high;
  for (int r : ranks) ((r & bit) ? high : low).push_back(r);
  return tree_value(low, value) + tree_value(high, value);
}

inline std::vector<int> iota(int n) {
  std::vector<int> v(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) v[i] = i;
  return v;
}

}  // namespace dovetail::comm
