// Parameter inventories of models: the JSON files that `dovetail plan` reads. One object a model:
// "name", "numel", and "groups", each with "name", "repeat" (how many equal groups the model has)
// and "params" of "name", "shape", "kind", "heads" and "heads_dim" (see TensorSpec).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/layout/tensor_spec.h"

namespace dovetail::plan {

struct InventoryGroup {
  std::string name;
  int64_t repeat = 1;
  std::vector<TensorSpec> tensors;
  int64_t numel() const;  // of one of the equal groups
};

struct Inventory {
  std::string name;
  std::vector<InventoryGroup> groups;
  int64_t numel() const;  // of the whole model
};

// Throws FileError naming the file and what is wrong with it: missing, no JSON, a missing or
// impossible field, a "numel" that the shapes do not add up to.
Inventory read_inventory(const std::string& path);
Inventory parse_inventory(std::string_view json, const std::string& path);

}  // namespace dovetail::plan
