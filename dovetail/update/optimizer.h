// From options to operations, and what the operations mean for each parameter.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "dovetail/update/adamw.h"
#include "dovetail/update/muon.h"
#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"
#include "dovetail/update/sgd.h"
#include "dovetail/update/shampoo.h"

namespace dovetail {

struct OptimizerOptions {
  // Of all parameters, or of the matrices: "muon" and "shampoo" leave vectors and embeddings to "adamw".
  // A rule can give any parameter any of kOptimizers.
  std::string name = "adamw";
  AdamWOptions adamw = {};  // also of adam8
  SgdOptions sgd = {};
  MuonOptions muon = {};
  ShampooOptions shampoo = {};
  RuleOptions rules = {};  // `matrices` and `others` are filled in
};

inline constexpr std::array<std::string_view, 5> kOptimizers = {"adamw", "adam8", "sgd", "muon",
                                                                "shampoo"};

// The rules with `matrices` and `others` filled in: what every parameter uses, see ParameterRules::table.
ParameterRules optimizer_rules(const OptimizerOptions& options);

// Throws ConfigError for an unknown name and whatever the operations refuse. With `tensors`, the
// trainable and frozen parameters of the model, rules that match none of them are refused as well.
UpdateOps make_optimizer(const OptimizerOptions& options, std::span<const TensorSpec> tensors);

// What an optimizer does with one parameter.
struct ParameterUpdate {
  std::vector<size_t> ops;        // numbers in the list of operations, in the order they run
  std::vector<StateField> state;  // fields to create, one of each name; operations may share one
  bool operator==(const ParameterUpdate&) const = default;
};

// One entry for each tensor. Throws ConfigError when
// - two tensors have the same name,
// - no operation applies to a tensor,
// - a state field is called "weight" or "grad", or an operation lists a name twice,
// - two operations give one name different schemas on the same tensor,
// - an operation uses a field that none of the tensor's operations keeps, or in a way that its units
//   or the field's kind forbid.
std::vector<ParameterUpdate> plan_updates(const UpdateOps& ops,
                                          std::span<const TensorSpec> tensors);

// All operations in one line: equal on all ranks, hashed with the plan.
std::string describe(const UpdateOps& ops);

}  // namespace dovetail
