// Shape of a Llama-style decoder, with the key names of Hugging Face's config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace dovetail::models {

struct LlamaConfig {
  int64_t hidden_size = 512;
  int64_t intermediate_size = 1408;
  int64_t num_hidden_layers = 8;
  int64_t num_attention_heads = 8;
  int64_t num_key_value_heads = 8;  // heads of keys and values; divides num_attention_heads
  int64_t head_dim = 64;
  int64_t vocab_size = 8192;
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000.0;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;

  bool operator==(const LlamaConfig&) const = default;

  // Throws ConfigError naming the field that is out of range or does not divide.
  void check() const;
};

// Only the keys of LlamaConfig are allowed. num_key_value_heads and head_dim follow from the others
// where absent.
LlamaConfig parse_llama_config(const nlohmann::json& options);
// From the text of a Hugging Face config.json; `where` names it in errors. Keys that do not change
// the computation are ignored; what is not built here (biases, scaled rotary frequencies, other
// activations) throws ConfigError.
LlamaConfig parse_hugging_face_config(const std::string& text, const std::string& where);
// A config.json that Hugging Face loads as LlamaForCausalLM.
std::string hugging_face_config(const LlamaConfig& config);

}  // namespace dovetail::models
