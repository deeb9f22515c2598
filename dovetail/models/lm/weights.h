// Weights of a Llama in Hugging Face's files.
#pragma once

#include <filesystem>

#include "dovetail/models/lm/llama.h"

namespace dovetail::models {

// Fills every parameter from a safetensors file or folder (fp32, bf16 or fp16, converted to the
// parameter's dtype). A tied head may be absent. Throws FileError, before anything is changed, that
// lists every name missing, unexpected, or of another shape.
void load_weights(LlamaForCausalLM& model, const std::filesystem::path& path);

// Writes parameters as a file that Hugging Face loads; a tied head is left out.
void save_weights(const LlamaForCausalLM& model, const std::filesystem::path& file);

// The same as a folder: config.json and model.safetensors.
void save_pretrained(const LlamaForCausalLM& model, const std::filesystem::path& folder);
LlamaConfig load_config(const std::filesystem::path& folder);

}  // namespace dovetail::models
