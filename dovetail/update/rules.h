// Optimizer, learning rate factor and weight decay of each parameter, by rules on its name.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/layout/tensor_spec.h"

namespace dovetail {

// The first rule whose pattern matches a parameter's whole name holds for it.
struct ParameterRule {
  std::string pattern;  // '*' is any run of characters, also none; all else is literal
  double lr_scale = 1;  // multiplies the learning rate of the step
  std::optional<double> weight_decay = {};  // unset: the default of RuleOptions for this parameter
  std::string optimizer = {};               // empty: the default of RuleOptions for this parameter
};

struct RuleOptions {
  double weight_decay = 0;     // default of parameters that no rule gives another one
  bool decay_vectors = false;  // false: that default is 0 for ParamKind::vector (biases, norms)
  std::vector<ParameterRule> rules = {};
  // Optimizers of parameters that no rule gives another one; empty: whichever is asked. Matrices are
  // all but vectors and embeddings.
  std::string matrices = {}, others = {};
};

// What holds for one parameter.
struct ParameterFactors {
  double lr_scale = 1;
  double weight_decay = 0;
  int rule = -1;  // number of the rule, from 0; -1 when none matched
  std::string optimizer = {};  // empty: any
};

class ParameterRules {
 public:
  // Throws ConfigError for a factor that is negative or not finite and for an empty pattern.
  explicit ParameterRules(RuleOptions options);

  ParameterFactors factors(const TensorSpec& tensor) const;
  // Whether the parameter belongs to the optimizer of this name.
  bool selects(std::string_view optimizer, const TensorSpec& tensor) const;
  // Throws ConfigError when a rule's pattern matches none of the names: a rule that does nothing is
  // a misspelt one.
  void check_used(std::span<const TensorSpec> tensors) const;
  // One line with every number and pattern.
  std::string describe() const;
  // For people: one line a parameter with its factors and the rule they come from.
  std::string table(std::span<const TensorSpec> tensors) const;

 private:
  RuleOptions options_;
};

// Whether the whole of text matches a pattern as in ParameterRule.
bool matches(std::string_view pattern, std::string_view text);

}  // namespace dovetail
