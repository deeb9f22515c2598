#include "dovetail/update/rules.h"

#include <algorithm>
#include <cmath>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

void check_factor(double value, const std::string& what) {
  if (!(std::isfinite(value) && value >= 0))
    raise<ConfigError>("{} must be a finite number of at least 0, got {}", what, value);
}

}  // namespace

ParameterRules::ParameterRules(RuleOptions options) : options_(std::move(options)) {
  check_factor(options_.weight_decay, "weight_decay");
  for (size_t i = 0; i < options_.rules.size(); ++i) {
    const ParameterRule& rule = options_.rules[i];
    if (rule.pattern.empty()) raise<ConfigError>("the pattern of parameter rule {} is empty", i);
    const std::string of = fmt::format(" of parameter rule {} (\"{}\")", i, rule.pattern);
    check_factor(rule.lr_scale, "lr_scale" + of);
    if (rule.weight_decay) check_factor(*rule.weight_decay, "weight_decay" + of);
  }
}

ParameterFactors ParameterRules::factors(const TensorSpec& tensor) const {
  const bool decays = options_.decay_vectors || tensor.kind != ParamKind::vector;
  const bool matrix = tensor.kind != ParamKind::vector && tensor.kind != ParamKind::embedding;
  ParameterFactors result{1, decays ? options_.weight_decay : 0, -1, matrix ? options_.matrices : options_.others};
  for (size_t i = 0; i < options_.rules.size(); ++i) {
    const ParameterRule& rule = options_.rules[i];
    if (!matches(rule.pattern, tensor.name)) continue;
    return {rule.lr_scale, rule.weight_decay.value_or(result.weight_decay), static_cast<int>(i),
            rule.optimizer.empty() ? result.optimizer : rule.optimizer};
  }
  return result;
}

bool ParameterRules::selects(std::string_view optimizer, const TensorSpec& tensor) const {
  const std::string chosen = factors(tensor).optimizer;
  return chosen.empty() || chosen == optimizer;
}

void ParameterRules::check_used(std::span<const TensorSpec> tensors) const {
  for (size_t i = 0; i < options_.rules.size(); ++i) {
    const std::string& pattern = options_.rules[i].pattern;
    const bool used = std::any_of(tensors.begin(), tensors.end(),
                                  [&](const TensorSpec& t) { return matches(pattern, t.name); });
    if (!used)
      raise<ConfigError>("parameter rule {} (\"{}\") matches none of the {} parameters", i, pattern,
                         tensors.size());
  }
}

std::string ParameterRules::describe() const {
  std::string text = fmt::format("weight_decay={} decay_vectors={}", options_.weight_decay,
                                 options_.decay_vectors);
  if (!options_.matrices.empty() || !options_.others.empty())
    text += fmt::format(" matrices={} others={}", options_.matrices, options_.others);
  for (const ParameterRule& rule : options_.rules) {
    text += fmt::format(" rule=\"{}\":lr_scale={}", rule.pattern, rule.lr_scale);
    if (rule.weight_decay) text += fmt::format(",weight_decay={}", *rule.weight_decay);
    if (!rule.optimizer.empty()) text += ",optimizer=" + rule.optimizer;
  }
  return text;
}

std::string ParameterRules::table(std::span<const TensorSpec> tensors) const {
  size_t width = std::string_view("parameter").size();
  for (const TensorSpec& tensor : tensors) width = std::max(width, tensor.name.size());
  std::string text = fmt::format("{:<{}}  {:<9}  {:>8}  {:>12}  {}\n", "parameter", width, "optimizer", "lr_scale",
                                 "weight_decay", "rule");
  for (const TensorSpec& tensor : tensors) {
    const ParameterFactors f = factors(tensor);
    const std::string rule =
        f.rule < 0 ? "default" : fmt::format("{} (\"{}\")", f.rule, options_.rules[f.rule].pattern);
    text += fmt::format("{:<{}}  {:<9}  {:>8}  {:>12}  {}\n", tensor.name, width, f.optimizer, f.lr_scale,
                        f.weight_decay, rule);
  }
  return text;
}

bool matches(std::string_view pattern, std::string_view text) {
  constexpr size_t none = std::string_view::npos;
  size_t p = 0, t = 0, star = none, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != none) {  // let the last star take one character more
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace dovetail
