// The state that training starts from: the same on every rank, or an error that names the first difference.
#pragma once

#include "dovetail/comm/group.h"
#include "dovetail/engine/engine.h"
#include "dovetail/engine/unit_model.h"

namespace dovetail::engine_detail {

// must_agree: compares hashes of all parameters and buffers over the world, but for those that are sharded already;
// throws ConfigError on every rank. Otherwise rank 0's bytes replace all others'. Collective.
void settle_initial(const UnitModel& model, InitialWeights how, comm::Group& world);

// Compares the plan's text and the optimizer's description over the world; throws PlanError naming the first line that
// differs. Collective.
void compare_plans(const plan::Plan& plan, const std::string& optimizer, comm::Group& world);

}  // namespace dovetail::engine_detail
