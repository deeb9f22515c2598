// How collectives of the rank grid cut a segment.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/base/interval.h"
#include "dovetail/layout/segment.h"

namespace dovetail::engine_detail {

inline std::vector<Interval> even_slices(int64_t count, int64_t each) {
  std::vector<Interval> slices;
  for (int64_t k = 0; k < count; ++k) slices.push_back({k * each, (k + 1) * each});
  return slices;
}

// Zero1 intervals that make up one coarser shard, as seen from its start.
inline std::vector<Interval> zero1_slices(const SegmentLayout& layout, int64_t first_shard, int64_t count,
                                          int64_t origin) {
  std::vector<Interval> slices;
  for (int64_t j = 0; j < count; ++j) slices.push_back(layout.zero1_interval(first_shard + j).shifted(-origin));
  return slices;
}

}  // namespace dovetail::engine_detail
