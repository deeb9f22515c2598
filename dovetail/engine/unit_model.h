// A model as the engine takes it over: units and their parameters, however its modules are written. scan()
// (module_scan.h) makes one of a tree of C++ modules; the Python face makes one of Python modules.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/storage/state_entry.h"

namespace dovetail {

// Of a parameter that is sharded already: what this rank holds of it.
struct MainShard {
  std::vector<int64_t> shape;  // of the global tensor
  at::Tensor values;           // [elements of the rank's zero1 shard], fp32
};

struct UnitParameter {
  std::string name;    // the first of its names in module order
  // The module's own, which becomes the runtime parameter. Its value, the same on every rank, is what training starts
  // from, unless there is a shard: then it has neither value nor shape.
  at::Tensor tensor;
  std::optional<MainShard> shard = std::nullopt;

  std::vector<int64_t> shape() const { return shard ? shard->shape : tensor.sizes().vec(); }
};

// Parameters that are gathered together.
struct ModelUnit {
  std::string name;                       // module path; "" for the root
  bool backward_needs_parameters = true;  // ops::UnitBase
  std::vector<UnitParameter> parameters;
  std::string format = {};                      // plan::GroupSpec
  std::optional<bool> keep_after_forward = {};  // plan::GroupSpec
  // Of a module that has other parameters in another unit (a head and an embedding): this one's are used behind the
  // units before it in the list. Its hooks are called together with the other's; it is reduced as soon as backward has
  // written all its gradients, if that was before other units' in the last step, else after them.
  bool behind_units = false;
  // Told when runtime parameters can be read from now on (true) and that they no longer can. May be null.
  std::function<void(bool gathered)> residence_changed = nullptr;
};

struct ModelBuffer {
  std::string name;
  at::Tensor tensor;
};

struct UnitModel {
  std::vector<ModelUnit> units;  // forward order as far as known, the root last
  std::vector<TensorAlias> aliases;
  std::vector<ModelBuffer> buffers;
};

}  // namespace dovetail
