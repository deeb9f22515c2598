// Models by name, for the trainer.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "dovetail/models/common/model.h"

namespace dovetail::models {

// "llama" (options: models/lm/config.h).
std::vector<std::string> model_names();

// `options` is a JSON object of the model's own keys; unknown keys, wrong types and unknown names
// throw ConfigError. Parameters have the dtype and device of `tensors` and are uninitialised until
// reset_parameters or a load.
std::unique_ptr<Model> build_model(const std::string& name, const nlohmann::json& options,
                                   const at::TensorOptions& tensors = {});

}  // namespace dovetail::models
