// Where each level's shard of one tensor lies in the original tensor: whole -> zero3 -> zero2 -> zero1 shard.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "dovetail/base/interval.h"
#include "dovetail/layout/segment.h"

namespace dovetail {

enum class Level : uint8_t { whole, zero3, zero2, zero1 };
inline constexpr int kLevels = 4;

// All intervals are of elements of the original tensor, row-major; an empty shard is {0, 0}.
class ShardChain {
 public:
  // The chain of one placement for a rank that holds the given shards of the segment.
  ShardChain(const SegmentLayout& layout, const Placement& placement, int64_t zero3_shard, int64_t zero2_shard,
             int64_t zero1_shard);

  // The elements of the original tensor held at a level.
  Interval held(Level level) const { return held_[static_cast<int>(level)]; }
  // Elements from the start of the level's shard buffer (of the whole segment) to the first held element; 0
  // when empty.
  int64_t buffer_offset(Level level) const { return offset_[static_cast<int>(level)]; }

  // The original index of the i-th element held at a level, and back. Throws InvariantError out of range.
  int64_t to_original(Level level, int64_t local) const;
  int64_t to_local(Level level, int64_t original) const;
  // The i-th element held at one level as an index at another; both must hold it.
  int64_t convert(Level from, int64_t local, Level to) const;

  // "whole[0,16) zero3[8,16)@0 zero2[8,16)@0 zero1[8,12)@0"
  std::string to_text() const;

 private:
  std::array<Interval, kLevels> held_;
  std::array<int64_t, kLevels> offset_{};
};

}  // namespace dovetail
