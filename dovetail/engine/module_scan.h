// Finds the groups of a module tree: which unit each parameter belongs to.
//
// A parameter belongs to the unit nearest above the module that registers it. A tied parameter, registered in several
// places, belongs to the lowest unit that holds all its users, and is listed once; its other names are aliases.
#pragma once

#include <vector>

#include "dovetail/engine/unit_model.h"
#include "dovetail/ops/gradient_sink.h"
#include "dovetail/ops/unit.h"

namespace torch::nn {
class Module;
}

namespace dovetail::engine_detail {

struct ScannedModel {
  UnitModel model;                     // units in registration order
  std::vector<ops::UnitBase*> units;   // of the same numbers; null for a root that is no unit and then owns nothing
  std::vector<ops::SinkUser*> sink_users;
};

// Throws ConfigError naming the parameter: on the meta device, not dense, not floating point, of a
// dtype other than fp32 or bf16, or outside of every unit. The module owns what the pointers point
// to.
ScannedModel scan(torch::nn::Module& root);

}  // namespace dovetail::engine_detail
