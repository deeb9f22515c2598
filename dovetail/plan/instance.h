// Planner instances as JSON: {"zero1":5,"zero2":5,"zero3":5,"segments":1,"tensors":[[e,g],...]},
// extents and blocks in units. zero3 defaults to zero1; zero2 to zero3 where that is given, else to
// zero1; segments to 1.
#pragma once

#include <string>
#include <string_view>

#include "dovetail/plan/ragged.h"

namespace dovetail::plan {

// Throws FileError naming the file and the place; ConfigError for degrees and tensors that cannot
// be.
RaggedProblem parse_instance(std::string_view json, const std::string& path);
RaggedProblem read_instance(const std::string& path);

// {"shard":[S1 a segment],"shard_zero2":[...],"shard_zero3":[...],"bound":sum of S1
// proved,"bound_zero3":...,"gap":...,
//  "exact":...,"steps":...,"ms":...,"placements":[[[tensor, offset],...] a segment]}
std::string instance_json(const RaggedProblem& problem, const RaggedPlan& plan,
                          double milliseconds);
std::string instance_text(const RaggedProblem& problem, const RaggedPlan& plan,
                          double milliseconds);

}  // namespace dovetail::plan
