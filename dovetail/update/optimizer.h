// From options to operations, and what the operations mean for each parameter.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "dovetail/update/adamw.h"
#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"
#include "dovetail/update/sgd.h"

namespace dovetail {

struct OptimizerOptions {
  std::string name = "adamw";  // "adamw" or "sgd"
  AdamWOptions adamw = {};     // read for "adamw"
  SgdOptions sgd = {};         // read for "sgd"
  RuleOptions rules = {};
};

// Throws ConfigError for an unknown name and whatever the operations refuse. With `tensors`, the
// trainable and frozen parameters of the model, rules that match none of them are refused as well.
UpdateOps make_optimizer(const OptimizerOptions& options, std::span<const TensorSpec> tensors);

// What an optimizer does with one parameter.
struct ParameterUpdate {
  std::vector<size_t> ops;        // numbers in the list of operations, in the order they run
  std::vector<StateField> state;  // fields to create, one of each name; operations may share one
};

// One entry for each tensor. Throws ConfigError when
// - two tensors have the same name,
// - no operation applies to a tensor,
// - a state field is called "weight" or "grad", or an operation lists a name twice,
// - two operations give one name different schemas on the same tensor,
// - an operation uses a field that none of the tensor's operations keeps, or writes "grad".
std::vector<ParameterUpdate> plan_updates(const UpdateOps& ops,
                                          std::span<const TensorSpec> tensors);

// All operations in one line: equal on all ranks, hashed with the plan.
std::string describe(const UpdateOps& ops);

}  // namespace dovetail
