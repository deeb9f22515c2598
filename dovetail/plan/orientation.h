// Ways to store a model so that blocks agree: matrices transposed to one row length or to short
// rows, fused experts as single ones. Both follow from the model alone, never from the degrees:
// 8-bit blocks and random bits stay where they are.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/layout/block.h"
#include "dovetail/layout/tensor_spec.h"
#include "dovetail/plan/inventory.h"

namespace dovetail::plan {

// The dimension that matrices and experts of most elements have: the model's hidden size. 0 when it
// has no matrix.
int64_t base_length(const Inventory& model);

// Matrices and experts stored transposed (the parameter is a strided view) where that gives them
// the rows wanted:
//   of length `base` where one of the two dimensions has it: one block length serves the bulk;
//   else, and for matrices with a dimension of at most a quarter of `base`, those of which fewer
//   elements are both whole rows and a multiple of `alignment`, mostly the shorter: small blocks
//   fill what the bulk leaves of the last shards.
// Names and element counts stay; heads are forgotten, so that a head's block is only ever asked of
// a matrix stored as it is.
std::vector<TensorSpec> oriented(std::vector<TensorSpec> tensors, int64_t base, int64_t alignment);

// Fused experts whose block under `kind` spans more than one expert, taken apart: [experts, rows,
// columns] as that many [1, rows, columns], named "name[i]"; [experts, n] as vectors of n. Others
// stay whole: boundaries may run through them from expert to expert, which single ones do not
// allow.
std::vector<TensorSpec> split_experts(const std::vector<TensorSpec>& tensors, BlockKind kind);

}  // namespace dovetail::plan
