#include "dovetail/models/registry.h"

#include <nlohmann/json.hpp>

#include "dovetail/base/error.h"
#include "dovetail/models/lm/language_model.h"

namespace dovetail::models {
namespace {

using Builder = std::unique_ptr<Model> (*)(const nlohmann::json&, const at::TensorOptions&);

std::unique_ptr<Model> build_llama(const nlohmann::json& options,
                                   const at::TensorOptions& tensors) {
  return std::make_unique<LanguageModel>(parse_llama_config(options), tensors);
}

constexpr std::pair<const char*, Builder> kModels[] = {{"llama", build_llama}};

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> out;
  for (const auto& model : kModels) out.emplace_back(model.first);
  return out;
}

std::unique_ptr<Model> build_model(const std::string& name, const nlohmann::json& options,
                                   const at::TensorOptions& tensors) {
  for (const auto& [known, build] : kModels)
    if (name == known) return build(options, tensors);
  std::string all;
  for (const std::string& known : model_names()) all += (all.empty() ? "" : ", ") + known;
  raise<ConfigError>("unknown model {}; there are {}", name, all);
}

}  // namespace dovetail::models
