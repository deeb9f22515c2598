// One planned buffer: where tensors lie in its element space and where its shards end.
//
// The element space is [0, zero3*shard3). Shards nest: zero3 shard k is [k*shard3, (k+1)*shard3); it divides
// evenly into zero2/zero3 zero2 shards of shard2 = shard3*zero3/zero2 elements; zero2 shard s is divided at
// s*shard2 + j*shard1, and the last sub-shards may be short or empty. Each tensor is one contiguous run;
// padding lies between runs.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/base/interval.h"

namespace dovetail {

struct Placement {
  int64_t tensor = 0;   // index into the plan's (or the caller's) list of tensors
  int64_t offset = 0;   // first element in element space
  int64_t numel = 0;    // 0 for tensors without elements
  int64_t block = 1;    // elements that no boundary may cut, counted from the tensor's start
  Interval interval() const { return {offset, offset + numel}; }
  bool operator==(const Placement&) const = default;
};

struct SegmentLayout {
  int64_t zero1 = 1, zero2 = 1, zero3 = 1;      // the degrees it was laid out for
  int64_t shard1 = 0, shard2 = 0, shard3 = 0;   // elements; shard3*zero3 == shard2*zero2 <= shard1*zero1
  int64_t bound = 0;                            // proven lower bound on shard3
  std::vector<Placement> placements;            // ascending by offset

  int64_t size() const { return zero3 * shard3; }
  Interval zero3_interval(int64_t k) const { return {k * shard3, (k + 1) * shard3}; }
  Interval zero2_interval(int64_t s) const { return {s * shard2, (s + 1) * shard2}; }
  // Zero1 shard number q = s*(zero1/zero2) + j; {x, x} at its zero2 shard's end when empty.
  Interval zero1_interval(int64_t q) const;
  // The zero1 shard that holds an element of the element space; not for a segment of size 0.
  int64_t zero1_shard_at(int64_t element) const {
    return element / shard2 * (zero1 / zero2) + element % shard2 / shard1;
  }
  bool operator==(const SegmentLayout&) const = default;
};

// Checks from the definition: nesting, order, no overlap, no block cut at any level. Throws PlanError naming
// the tensor.
void verify(const SegmentLayout& layout);

}  // namespace dovetail
