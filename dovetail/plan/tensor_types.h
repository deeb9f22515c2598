// Equal tensors are interchangeable: the search works on types and counts, never on single tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dovetail/plan/grid.h"

namespace dovetail::plan {

// `count` interchangeable things of one shape. Each is one tensor, or (the fluid lump) several laid
// end to end.
struct TensorType {
  RaggedTensor shape;
  int64_t count = 0;
  std::vector<int> members;  // indices of the tensors; thing i is members[i*n .. (i+1)*n) with n =
                             // members.size()/count
};

struct TensorTypes {
  std::vector<TensorType> types;  // coarsest block first, then longest
  int64_t total = 0;              // sum of extents
  bool lumped =
      false;  // the tensors of block 1 were poured into one; a refusal then proves nothing
};

// Groups tensors[i] for i in `chosen`, leaving out empty ones. With more than `max_types` types,
// those of block 1 become one lump.
TensorTypes group_by_type(std::span<const RaggedTensor> tensors, std::span<const int> chosen,
                          int max_types = 14);

}  // namespace dovetail::plan
