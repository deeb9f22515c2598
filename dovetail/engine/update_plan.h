// What an optimizer means for one plan: state, assembled units and their owners. The same on every rank.
#pragma once

#include <vector>

#include "dovetail/plan/bytes.h"
#include "dovetail/plan/owners.h"
#include "dovetail/plan/plan.h"
#include "dovetail/plan/staging.h"
#include "dovetail/update/optimizer.h"

namespace dovetail::engine_detail {

struct UpdatePlan {
  std::vector<ParameterUpdate> updates;  // per parameter of the plan
  std::vector<plan::UnitDemand> demands;
  std::vector<std::vector<StateField>> unit_state;  // per demand: the fields kept per unit
  plan::OwnerPlan owners;
  std::vector<plan::UnitBatch> batches;
};

// Throws ConfigError for what plan_updates and assign_owners refuse.
UpdatePlan plan_update(const plan::Plan& plan, const UpdateOps& ops);

// What the layout has to know of an optimizer, see plan::UpdateNeeds.
plan::UpdateNeeds update_needs(const TensorSpec& tensor, const UpdateOps& ops);

// Everything a rank will hold, and the fragments it will send in a step.
plan::HeldBytes held_bytes(const plan::Plan& plan, const UpdatePlan& update, int64_t rank);

}  // namespace dovetail::engine_detail
