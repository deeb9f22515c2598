#include "dovetail/engine/update_plan.h"

#include "dovetail/base/error.h"

namespace dovetail::engine_detail {
namespace {

DType dtype_of_field(const plan::Plan& plan, const ParameterUpdate& update,
                     const std::string& name) {
  if (name == kWeight) return plan.options.main;
  if (name == kGrad) return DType::f32;
  for (const StateField& f : update.state)
    if (f.name == name) return f.dtype;
  DT_CHECK(false, "field {}", name);
  return DType::f32;
}

// The fields that an operation keeps per unit, see UpdatePlan::unit_state.
std::vector<StateField> state_per_unit(const UpdateOp& op, const TensorSpec& t) {
  std::vector<StateField> fields = op.state(t);
  std::erase_if(fields, [](const StateField& f) { return f.per != StateField::Per::unit; });
  return fields;
}

plan::UnitDemand demand_of(const plan::Plan& plan, int64_t tensor, int64_t number,
                           const UpdateOp& op, const ParameterUpdate& update,
                           const std::vector<StateField>& unit_state) {
  const TensorSpec& t = plan.tensors[tensor];
  plan::UnitDemand demand{.tensor = tensor,
                          .op = number,
                          .places = unit_places(t, op.unit(t)),
                          .cost = {},
                          .state = {},
                          .workspace = {},
                          .fields = {}};
  for (size_t u = 0; u < demand.places.size(); ++u) {
    demand.cost.push_back(op.cost(t, demand.places[u]));
    demand.workspace.push_back(op.workspace_bytes(t, demand.places[u]));
    demand.state.push_back(0);
    for (const StateField& f : unit_state) demand.state[u] += f.unit_values[u] * size_of(f.dtype);
  }
  for (const FieldUse& use : op.uses(t)) {
    const int64_t bytes = size_of(dtype_of_field(plan, update, use.name));
    demand.fields.push_back({.name = use.name,
                             .bytes = bytes,
                             .wire = use.travels_as_bf16 ? 2 : bytes,
                             .reads = use.reads(),
                             .writes = use.writes()});
  }
  return demand;
}

// Where boundaries had better fall: between units that are runs of elements, one behind the other;
// around the tensor where they are not.
std::vector<int64_t> unit_edges(const TensorSpec& t, const Unit& unit) {
  std::vector<int64_t> edges{0};
  for (const UnitPlace& place : unit_places(t, unit)) {
    if (!place.contiguous() || place.first != edges.back()) return {0, t.numel()};
    edges.push_back(place.first + place.numel());
  }
  return edges.size() > 1 ? edges : std::vector<int64_t>{};
}

// Equal on all ranks. A plan that was made for other operations may cut what these need whole.
void check_uncut(const plan::Plan& plan, const UpdateOps& ops) {
  const std::vector<plan::TensorPlace> places = plan::tensor_places(plan);
  for (int64_t t = 0; t < std::ssize(plan.tensors); ++t) {
    const int64_t block = update_needs(plan.tensors[t], ops).block;
    for (int64_t q = 0; block > 1 && places[t].segment && q < plan.options.degrees.zero1; ++q) {
      const Interval own =
          intersect(places[t].segment->zero1_interval(q), places[t].placement->interval());
      if (const int64_t first = own.begin - places[t].placement->offset; !own.empty() && first % block != 0)
        raise<ConfigError>("parameter {}: its optimizer wanted blocks of {} elements uncut, got a plan that cuts it "
                           "at element {}", plan.tensors[t].name, block, first);
    }
  }
}

}  // namespace

UpdatePlan plan_update(const plan::Plan& plan, const UpdateOps& ops) {
  check_uncut(plan, ops);
  UpdatePlan result;
  // Without any operation the engine is stepped from outside, and no parameter needs one.
  if (ops.empty())
    result.updates.resize(plan.tensors.size());
  else
    result.updates = plan_updates(ops, plan.tensors);
  for (int64_t t = 0; t < std::ssize(plan.tensors); ++t)
    for (size_t op : result.updates[t].ops) {
      if (!ops[op]->unit(plan.tensors[t]).is_assembled()) continue;
      result.unit_state.push_back(state_per_unit(*ops[op], plan.tensors[t]));
      result.demands.push_back(demand_of(plan, t, static_cast<int64_t>(op), *ops[op],
                                         result.updates[t], result.unit_state.back()));
    }
  result.owners = plan::assign_owners(plan, result.demands);
  result.batches = plan::unit_batches(plan, result.demands, result.owners);
  return result;
}

plan::UpdateNeeds update_needs(const TensorSpec& t, const UpdateOps& ops) {
  plan::UpdateNeeds needs;
  for (const auto& op : ops) {
    if (!op->applies_to(t)) continue;
    const Unit unit = op->unit(t);
    needs.block = common_block(t, needs.block, uncut_elements(t, unit));
    for (const StateField& f : op->state(t))
      if (f.per == StateField::Per::block) needs.block = common_block(t, needs.block, f.block);
    // Of several assembled units the first one's edges are preferred.
    if (unit.is_assembled() && needs.unit_edges.empty()) needs.unit_edges = unit_edges(t, unit);
  }
  return needs;
}

plan::HeldBytes held_bytes(const plan::Plan& plan, const UpdatePlan& update, int64_t rank) {
  std::vector<std::vector<plan::StateShape>> state;
  for (const ParameterUpdate& u : update.updates) {
    state.emplace_back();
    for (const StateField& f : u.state)
      if (f.per != StateField::Per::unit)
        state.back().push_back({size_of(f.dtype), f.per == StateField::Per::block ? f.block : 1});
  }
  plan::HeldBytes held = plan::held_bytes(plan, rank, state);
  plan::add_unit_bytes(plan, update.demands, update.owners, rank, held);
  return held;
}

}  // namespace dovetail::engine_detail
