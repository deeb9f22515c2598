// Who holds what, as text: one line a zero1 shard, one letter a tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dovetail/plan/degrees.h"

namespace dovetail::plan {

struct DrawnTensor {
  std::string name;
  int64_t offset = 0;
  int64_t length = 0;
};

struct ShardSizes {
  int64_t zero3 = 0, zero2 = 0, zero1 = 0;
};

// Lines of 64 columns for the first and last shards (16 at most), each column showing the tensor
// that covers most of it, '.' where that is padding, ' ' where the shard is short; then the
// letters' names. Any unit of length.
std::string draw_shards(const Degrees& degrees, ShardSizes sizes,
                        const std::vector<DrawnTensor>& tensors);

}  // namespace dovetail::plan
