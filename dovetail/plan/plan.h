// A plan: everything that ranks must agree on before training starts, as a plain value. It prints, parses
// back, compares and hashes; the engine runs it and the simulator prices it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/dtype.h"
#include "dovetail/layout/block.h"
#include "dovetail/layout/segment.h"
#include "dovetail/layout/tensor_spec.h"
#include "dovetail/plan/boundary.h"
#include "dovetail/plan/degrees.h"
#include "dovetail/plan/format.h"

namespace dovetail::plan {

struct PlanOptions {
  int64_t world = 1;
  Degrees degrees;
  DType main = DType::f32;             // main weights
  std::string format = "fp32";         // runtime parameters and the gradients that kernels write
  BlockKind block = BlockKind::element;
  Boundary boundary = Boundary::block;  // unit: pad so that no unit of the update is cut
  int64_t alignment = 64;              // elements: tensors start at multiples of it
  int segments = 1;                    // at most this many a bucket
  bool reshard_after_forward = true;
  int prefetch = 1;                    // groups gathered ahead of the one that computes
  // Reductions left in flight while the next group computes; 0 = none. -1: as suits the transport, 0 where ranks read
  // one another's memory (nothing travels meanwhile), else 1; a plan holds what that came to.
  int pending_reductions = -1;
  bool local_accumulation = false;  // whole fp32 gradients, so that micro-batches need no communication
  int64_t host_ranks = 1;  // runs of so many ranks address one another's memory (comm::Group::host_ranks)
  bool operator==(const PlanOptions&) const = default;
};

// Throws ConfigError naming the option, what was wanted and what was got.
void validate(const PlanOptions& options);
void validate(const TensorSpec& tensor);

// What the update of one tensor asks of its layout.
struct UpdateNeeds {
  int64_t block = 1;  // elements that no boundary may cut, counted from the tensor's start
  // Ascending from 0 to numel: where a boundary costs no exchange; empty: anywhere.
  std::vector<int64_t> unit_edges = {};
  bool operator==(const UpdateNeeds&) const = default;
};

// A group as the caller describes it.
struct GroupSpec {
  std::string name;                    // module path; "" is the root group
  std::vector<TensorSpec> tensors;
  bool backward_needs_parameters = true;  // false: its backward reads no parameter (an embedding)
  std::vector<UpdateNeeds> needs = {};    // per tensor; empty: none
  std::string format = {};                // of its runtime parameters; empty: PlanOptions::format
  std::optional<bool> keep_after_forward = {};  // none: by its place, see make_plan
  bool operator==(const GroupSpec&) const = default;
};

struct BucketPlan {
  std::string format;
  std::vector<SegmentLayout> segments;  // Placement::tensor indexes Plan::tensors
  bool operator==(const BucketPlan&) const = default;
};

struct GroupPlan {
  std::string name;
  bool backward_needs_parameters = true;
  bool keep_after_forward = false;     // stays gathered between forward and backward, see make_plan
  std::vector<BucketPlan> buckets;
  bool operator==(const GroupPlan&) const = default;
};

struct Plan {
  PlanOptions options;
  std::vector<TensorSpec> tensors;     // of all groups, in order; the index is the parameter's number
  std::vector<GroupPlan> groups;       // execution order of forward; the root group is last
  bool operator==(const Plan&) const = default;
};

// Groups in forward order; the root group (may be empty of tensors), if any, last and named "". One bucket a
// group, of its runtime format; each tensor's block is the lcm of its own (block_elements), the format's and the
// update's, or the whole tensor where that is larger. A group without tensors has one bucket without segments; a group
// whose tensors have no elements has segments of size 0. Blocks and tensor numbers follow from the model and the
// block kind alone; offsets and shard sizes depend on the degrees.
// Kept after forward, unless its spec says otherwise: the root group, the group before it (its backward comes next),
// all groups unless reshard_after_forward. All groups in any case when zero3 == 1 (there is nothing to release).
// Throws ConfigError naming the option, group or tensor.
Plan make_plan(const PlanOptions& options, const std::vector<GroupSpec>& groups);

// Where a tensor lies. Pointers are into the plan.
struct TensorPlace {
  int64_t group = -1;
  const SegmentLayout* segment = nullptr;
  const Placement* placement = nullptr;
};
std::vector<TensorPlace> tensor_places(const Plan& plan);  // by tensor number

std::string to_text(const Plan& plan);
// The inverse. Throws PlanError with the line number for anything to_text() does not write and for plans that cannot
// be: bad options, layouts that fail verify(), tensors placed twice, nowhere or with another size.
Plan parse_plan(std::string_view text);
uint64_t hash_of(const Plan& plan);      // of its text

// The first line in which two plan texts differ, as "line N: A against B"; empty when they are equal.
std::string first_difference(std::string_view a, std::string_view b);

}  // namespace dovetail::plan
