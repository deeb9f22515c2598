// Finds the groups of a module tree: which unit each parameter belongs to.
//
// A parameter belongs to the unit nearest above the module that registers it. A tied parameter, registered in several
// places, belongs to the lowest unit that holds all its users, and is listed once; its other names are aliases.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "dovetail/layout/tensor_spec.h"
#include "dovetail/ops/gradient_sink.h"
#include "dovetail/ops/unit.h"
#include "dovetail/storage/state_entry.h"

namespace torch::nn {
class Module;
}

namespace dovetail::engine_detail {

struct ScannedParameter {
  std::string name;    // the first of its names in module order
  at::Tensor tensor;   // the module's own
};

struct ScannedGroup {
  std::string name;                  // module path; "" for the root
  ops::UnitBase* unit = nullptr;     // null for a root that is no unit and then owns nothing
  bool backward_needs_parameters = true;
  std::vector<ScannedParameter> parameters;
};

struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

struct ScannedModel {
  std::vector<ScannedGroup> groups;  // registration order, root last
  std::vector<TensorAlias> aliases;
  std::vector<NamedBuffer> buffers;
  std::vector<ops::SinkUser*> sink_users;
};

// Throws ConfigError naming the parameter: on the meta device, not dense, not floating point, of a
// dtype other than fp32 or bf16, or outside of every unit. The module owns what the pointers point
// to.
ScannedModel scan(torch::nn::Module& root);

}  // namespace dovetail::engine_detail
