#include "dovetail/update/optimizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <unordered_set>

#include "dovetail/base/error.h"
#include "dovetail/update/adam8.h"

namespace dovetail {
namespace {

std::string show(const StateField& field) {
  const char* per = field.per == StateField::Per::unit    ? ", per unit"
                    : field.per == StateField::Per::block ? ", per block"
                                                          : "";
  return fmt::format("{} starting at {}{}", name_of(field.dtype), field.initial, per);
}

const StateField* find(const std::vector<StateField>& fields, std::string_view name) {
  const auto at = std::find_if(fields.begin(), fields.end(),
                               [&](const StateField& f) { return f.name == name; });
  return at == fields.end() ? nullptr : &*at;
}

void check_per(const UpdateOp& op, const TensorSpec& tensor, const StateField& field) {
  if (field.per == StateField::Per::block && field.block < 1)
    raise<ConfigError>(
        "operation {}: state field \"{}\" of {}: wanted blocks of at least 1 element, got {}",
        op.name(), field.name, tensor.name, field.block);
  if (field.per != StateField::Per::unit) return;
  const Unit unit = op.unit(tensor);
  const size_t units = unit.is_assembled() ? unit_places(tensor, unit).size() : 0;
  if (!unit.is_assembled() || field.unit_values.size() != units)
    raise<ConfigError>(
        "operation {}: state field \"{}\" of {} is kept per unit: wanted an assembled unit and a "
        "size for "
        "each of its {} units, got units of kind {} and {} sizes",
        op.name(), field.name, tensor.name, units, unit.describe(), field.unit_values.size());
}

void add_state(const UpdateOp& op, const TensorSpec& tensor, std::vector<StateField>& state) {
  const std::vector<StateField> own = op.state(tensor);
  std::unordered_set<std::string> names;
  for (const StateField& field : own) {
    if (field.name == kWeight || field.name == kGrad)
      raise<ConfigError>("operation {} calls a state field of {} \"{}\", which every parameter has",
                         op.name(), tensor.name, field.name);
    check_per(op, tensor, field);
    if (!names.insert(field.name).second)
      raise<ConfigError>("operation {} lists state field \"{}\" of {} twice", op.name(), field.name,
                         tensor.name);
    const StateField* earlier = find(state, field.name);
    if (earlier && *earlier != field)
      raise<ConfigError>(
          "operation {} wants state field \"{}\" of {} as {}, but another operation "
          "keeps it as {}",
          op.name(), field.name, tensor.name, show(field), show(*earlier));
    if (!earlier) state.push_back(field);
  }
}

void check_uses(const UpdateOp& op, const TensorSpec& tensor,
                const std::vector<StateField>& state) {
  const bool assembled = op.unit(tensor).is_assembled();
  std::unordered_set<std::string> names;
  for (const FieldUse& use : op.uses(tensor)) {
    const StateField* field = find(state, use.name);
    if (!names.insert(use.name).second)
      raise<ConfigError>("operation {} lists field \"{}\" of {} twice", op.name(), use.name,
                         tensor.name);
    if (use.name != kWeight && use.name != kGrad && !field)
      raise<ConfigError>("operation {} uses field \"{}\" of {}, which no operation keeps",
                         op.name(), use.name, tensor.name);
    if (field && field->per == StateField::Per::unit)
      raise<ConfigError>(
          "operation {} lists field \"{}\" of {} among those it uses; it is kept per unit, and "
          "only the "
          "operation that keeps it sees it",
          op.name(), use.name, tensor.name);
    if (field && field->per == StateField::Per::block && assembled)
      raise<ConfigError>(
          "operation {} wants field \"{}\" of {} for units of kind {}; it is kept per block, which "
          "does "
          "not travel",
          op.name(), use.name, tensor.name, op.unit(tensor).describe());
    if (use.travels_as_bf16 && (!use.writes() || (field && field->dtype != DType::f32)))
      raise<ConfigError>(
          "operation {}: field \"{}\" of {} can travel as bf16 only if it is fp32 and written",
          op.name(), use.name, tensor.name);
  }
}

}  // namespace

ParameterRules optimizer_rules(const OptimizerOptions& options) {
  RuleOptions rules = options.rules;
  const bool matrices_only = options.name == "muon" || options.name == "shampoo";
  rules.matrices = options.name;
  rules.others = matrices_only ? "adamw" : options.name;
  return ParameterRules(std::move(rules));
}

UpdateOps make_optimizer(const OptimizerOptions& options, std::span<const TensorSpec> tensors) {
  const ParameterRules rules = optimizer_rules(options);
  rules.check_used(tensors);
  std::set<std::string> used{options.name};
  if (tensors.empty() && options.name != "sgd" && options.name != "adam8") used.insert("adamw");
  for (const TensorSpec& t : tensors) used.insert(rules.factors(t).optimizer);
  if (used.contains("muon") && options.muon.unit != "matrix" && !tensors.empty() &&
      std::none_of(tensors.begin(), tensors.end(), [&](const TensorSpec& t) {
        return rules.selects("muon", t) && muon_unit(options.muon, t).kind == UnitKind::node;
      }))
    raise<ConfigError>("muon.unit: wanted matrix or nodes that some parameter of muon has, got \"{}\"",
                       options.muon.unit);
  UpdateOps ops;
  for (const std::string& name : used) {
    if (name == "adamw")
      ops.push_back(std::make_shared<AdamW>(options.adamw, rules));
    else if (name == "adam8")
      ops.push_back(std::make_shared<Adam8>(options.adamw, rules));
    else if (name == "sgd")
      ops.push_back(std::make_shared<Sgd>(options.sgd, rules));
    else if (name == "muon")
      std::ranges::copy(make_muon(options.muon, rules), std::back_inserter(ops));
    else if (name == "shampoo")
      std::ranges::copy(make_shampoo(options.shampoo, rules), std::back_inserter(ops));
    else
      raise<ConfigError>("optimizer: wanted one of {}; got \"{}\"", fmt::join(kOptimizers, ", "),
                         name);
  }
  return ops;
}

std::vector<ParameterUpdate> plan_updates(const UpdateOps& ops,
                                          std::span<const TensorSpec> tensors) {
  std::unordered_set<std::string> names;
  std::vector<ParameterUpdate> result;
  for (const TensorSpec& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      raise<ConfigError>("two parameters are called \"{}\"", tensor.name);
    ParameterUpdate update;
    for (size_t i = 0; i < ops.size(); ++i)
      if (ops[i]->applies_to(tensor)) {
        update.ops.push_back(i);
        add_state(*ops[i], tensor, update.state);
      }
    if (update.ops.empty())
      raise<ConfigError>("no operation of the optimizer applies to parameter \"{}\"", tensor.name);
    for (size_t i : update.ops) check_uses(*ops[i], tensor, update.state);
    result.push_back(std::move(update));
  }
  return result;
}

std::string describe(const UpdateOps& ops) {
  std::string text;
  for (const auto& op : ops) text += (text.empty() ? "" : " | ") + op->describe();
  return text;
}

}  // namespace dovetail
