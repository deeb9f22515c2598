// From parameters in elements to planned segments: what the training engine and the reports ask
// for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dovetail/layout/segment.h"
#include "dovetail/plan/boundary.h"
#include "dovetail/plan/degrees.h"
#include "dovetail/plan/ragged.h"

namespace dovetail::plan {

struct LayoutTensor {
  std::string name;   // for messages
  int64_t numel = 0;  // elements; 0 is allowed
  int64_t block =
      1;  // elements that no boundary may cut, counted from the tensor's start; <= max(1, numel)
  // Edges of the units of the update, ascending from 0 to numel: boundaries had better fall on
  // them. Empty: any element is as good as another.
  std::vector<int64_t> unit_edges;
};

struct LayoutRequest {
  std::vector<LayoutTensor> tensors;
  Degrees degrees;
  int64_t alignment = 64;  // elements: tensors start and shards end at multiples of it
  int max_segments = 1;
  Boundary boundary = Boundary::block;
  CollectiveWeights weights;
};

struct ElementLayout {
  std::vector<SegmentLayout>
      segments;        // in elements; Placement::tensor indexes LayoutRequest::tensors
  int64_t bound3 = 0;  // elements; proven, see RaggedPlan
  int64_t bound1 = 0;
  bool exact = false;
  int64_t steps = 0;
  int64_t exchanged = 0;  // elements of units that lie outside their unit's largest fragment

  int64_t shard3() const;  // elements, summed over the segments
  int64_t shard1() const;
};

// Throws ConfigError naming the tensor and the numbers. With blocks of one element everywhere the
// tensors lie in the order given, each start rounded up to the alignment, all other padding at the
// end.
ElementLayout lay_out(const LayoutRequest& request);

// The request in units of the alignment: extents rounded up, blocks lcm(block, alignment), capped
// at the tensor.
RaggedProblem problem_of(const LayoutRequest& request);

}  // namespace dovetail::plan
