#include "dovetail/update/optimizer.h"

#include <algorithm>
#include <unordered_set>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

std::string show(const StateField& field) {
  return fmt::format("{} starting at {}", name_of(field.dtype), field.initial);
}

const StateField* find(const std::vector<StateField>& fields, std::string_view name) {
  const auto at = std::find_if(fields.begin(), fields.end(),
                               [&](const StateField& f) { return f.name == name; });
  return at == fields.end() ? nullptr : &*at;
}

void add_state(const UpdateOp& op, const TensorSpec& tensor, std::vector<StateField>& state) {
  const std::vector<StateField> own = op.state(tensor);
  std::unordered_set<std::string> names;
  for (const StateField& field : own) {
    if (field.name == kWeight || field.name == kGrad)
      raise<ConfigError>("operation {} calls a state field of {} \"{}\", which every parameter has",
                         op.name(), tensor.name, field.name);
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
  for (const FieldUse& use : op.uses(tensor)) {
    if (use.name == kGrad && use.access != Access::read)
      raise<ConfigError>("operation {} writes \"grad\" of {}, which is read-only", op.name(),
                         tensor.name);
    if (use.name != kWeight && use.name != kGrad && !find(state, use.name))
      raise<ConfigError>("operation {} uses field \"{}\" of {}, which no operation keeps",
                         op.name(), use.name, tensor.name);
  }
}

}  // namespace

UpdateOps make_optimizer(const OptimizerOptions& options, std::span<const TensorSpec> tensors) {
  ParameterRules rules(options.rules);
  rules.check_used(tensors);
  if (options.name == "adamw") return {std::make_shared<AdamW>(options.adamw, std::move(rules))};
  if (options.name == "sgd") return {std::make_shared<Sgd>(options.sgd, std::move(rules))};
  raise<ConfigError>("optimizer must be adamw or sgd, got \"{}\"", options.name);
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
