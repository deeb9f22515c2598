// Sharded state as the checkpoint and tools see it: named runs of elements of global tensors, wherever they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dovetail/base/dtype.h"
#include "dovetail/base/interval.h"

namespace dovetail {

// One field ("weight", "adamw.exp_avg", ...) of one tensor as this rank holds it. Fields have one
// value per element of the tensor.
struct StateEntry {
  std::string tensor;              // parameter name; aliases of tied parameters are listed apart
  std::string field;
  std::vector<int64_t> shape;      // logical shape of the global tensor
  DType dtype = DType::f32;
  // of the global tensor, row-major, that `data` holds; empty where this rank owns none
  Interval elements;
  std::byte* data = nullptr;       // elements.size() values
  bool writer = true;              // false on replicas that hold a copy of what another rank writes
  // A field with a run for each unit that a rank holds: an entry of no elements, then those of its units.
  bool per_unit = false;
  std::shared_ptr<void> owner = nullptr;  // of `data`; null: whoever made the list keeps it
};

// All entries of a rank, in the same order on every rank (same tensors and fields, other intervals).
using ShardedState = std::vector<StateEntry>;

// Names under which tied parameters are also known: alias -> name of the stored tensor.
struct TensorAlias {
  std::string alias;
  std::string tensor;
};

}  // namespace dovetail
