#include "dovetail/engine/module_scan.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "dovetail/base/error.h"

namespace dovetail::engine_detail {
namespace {

using torch::nn::Module;

struct Registration {
  at::Tensor tensor;
  std::vector<std::string> names;     // in module order
  std::vector<int64_t> unit_path;     // units above every user so far, outermost first
};

struct Walk {
  ScannedModel scanned;
  std::vector<ops::UnitBase*> units;  // in registration order; 0 is the root or null
  std::vector<std::string> unit_names;
  std::vector<Registration> parameters;
  std::unordered_map<c10::TensorImpl*, size_t> index;
  std::unordered_map<const Module*, std::string> seen;
};

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

void check_dense(const at::Tensor& t, const std::string& kind, const std::string& name) {
  if (t.is_meta())
    raise<ConfigError>(
        "{} {}: wanted memory, got the meta device; materialize the module and initialise it first", kind, name);
  if (t.layout() != at::kStrided) raise<ConfigError>("{} {}: wanted a dense tensor, got {}", kind, name,
                                                     t.is_sparse() ? "a sparse one" : "another layout");
}

void add_parameter(Walk& walk, const at::Tensor& tensor, const std::string& name, const std::vector<int64_t>& path) {
  check_dense(tensor, "parameter", name);
  if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kBFloat16)
    raise<ConfigError>("parameter {}: wanted float32 or bfloat16, got {}", name, c10::toString(tensor.scalar_type()));
  auto [it, fresh] = walk.index.try_emplace(tensor.unsafeGetTensorImpl(), walk.parameters.size());
  if (fresh) {
    walk.parameters.push_back({tensor, {name}, path});
    return;
  }
  Registration& r = walk.parameters[it->second];
  r.names.push_back(name);
  const size_t common = std::mismatch(r.unit_path.begin(), r.unit_path.end(), path.begin(), path.end()).first -
                        r.unit_path.begin();
  r.unit_path.resize(common);
}

void visit(Walk& walk, Module& module, const std::string& prefix, std::vector<int64_t> path) {
  const bool again = !walk.seen.try_emplace(&module, prefix).second;
  if (auto* unit = dynamic_cast<ops::UnitBase*>(&module); unit && !prefix.empty()) {
    auto it = std::find(walk.units.begin() + 1, walk.units.end(), unit);
    path.push_back(it - walk.units.begin());
    if (it == walk.units.end()) {
      walk.units.push_back(unit);
      walk.unit_names.push_back(prefix);
    }
  }
  for (const auto& p : module.named_parameters(/*recurse=*/false))
    if (p.value().defined()) add_parameter(walk, p.value(), join(prefix, p.key()), path);
  if (!again) {
    for (const auto& b : module.named_buffers(/*recurse=*/false))
      if (b.value().defined()) {
        check_dense(b.value(), "buffer", join(prefix, b.key()));
        walk.scanned.model.buffers.push_back({join(prefix, b.key()), b.value()});
      }
    if (auto* user = dynamic_cast<ops::SinkUser*>(&module)) walk.scanned.sink_users.push_back(user);
  }
  for (const auto& child : module.named_children()) visit(walk, *child.value(), join(prefix, child.key()), path);
}

}  // namespace

ScannedModel scan(Module& root) {
  Walk walk;
  walk.units.push_back(dynamic_cast<ops::UnitBase*>(&root));
  walk.unit_names.push_back("");
  visit(walk, root, "", {0});
  UnitModel& model = walk.scanned.model;
  model.units.resize(walk.units.size());
  for (size_t u = 0; u < walk.units.size(); ++u) {
    model.units[u].name = walk.unit_names[u];
    model.units[u].backward_needs_parameters = !walk.units[u] || walk.units[u]->backward_needs_parameters();
  }
  for (const Registration& r : walk.parameters) {
    if (!walk.units[r.unit_path.back()])
      raise<ConfigError>("parameter {}: outside of every unit; make the root module an ops::Unit", r.names[0]);
    model.units[r.unit_path.back()].parameters.push_back({r.names[0], r.tensor});
    for (size_t i = 1; i < r.names.size(); ++i) model.aliases.push_back({r.names[i], r.names[0]});
  }
  std::rotate(model.units.begin(), model.units.begin() + 1, model.units.end());  // the root last
  std::rotate(walk.units.begin(), walk.units.begin() + 1, walk.units.end());
  walk.scanned.units = std::move(walk.units);
  return std::move(walk.scanned);
}

}  // namespace dovetail::engine_detail
