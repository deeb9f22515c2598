#include "dovetail/models/lm/config.h"

#include <nlohmann/json.hpp>

#include "dovetail/base/error.h"

namespace dovetail::models {
namespace {

using nlohmann::json;

// Calls f(key, field) for every field.
template <class Config, class F>
void for_fields(Config& c, F&& f) {
  f("hidden_size", c.hidden_size);
  f("intermediate_size", c.intermediate_size);
  f("num_hidden_layers", c.num_hidden_layers);
  f("num_attention_heads", c.num_attention_heads);
  f("num_key_value_heads", c.num_key_value_heads);
  f("head_dim", c.head_dim);
  f("vocab_size", c.vocab_size);
  f("max_position_embeddings", c.max_position_embeddings);
  f("rms_norm_eps", c.rms_norm_eps);
  f("rope_theta", c.rope_theta);
  f("initializer_range", c.initializer_range);
  f("tie_word_embeddings", c.tie_word_embeddings);
}

void read(const json& value, const std::string& key, int64_t& field) {
  if (!value.is_number_integer())
    raise<ConfigError>("{}: wanted an integer, got {}", key, value.dump());
  field = value.get<int64_t>();
}
void read(const json& value, const std::string& key, double& field) {
  if (!value.is_number()) raise<ConfigError>("{}: wanted a number, got {}", key, value.dump());
  field = value.get<double>();
}
void read(const json& value, const std::string& key, bool& field) {
  if (!value.is_boolean())
    raise<ConfigError>("{}: wanted true or false, got {}", key, value.dump());
  field = value.get<bool>();
}

bool present(const json& options, const char* key) {
  return options.contains(key) && !options.at(key).is_null();
}

LlamaConfig read_fields(const json& options) {
  LlamaConfig config;
  for_fields(config, [&](const char* key, auto& field) {
    if (present(options, key)) read(options.at(key), key, field);
  });
  if (!present(options, "num_key_value_heads"))
    config.num_key_value_heads = config.num_attention_heads;
  if (!present(options, "head_dim") && config.num_attention_heads > 0)
    config.head_dim = config.hidden_size / config.num_attention_heads;
  return config;
}

// Transformers 5 keeps the base of the rotary angles in a table of its own.
void read_rope(const json& options, LlamaConfig& config, const std::string& where) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!present(options, key)) continue;
    const json& rope = options.at(key);
    const std::string type = rope.value("rope_type", rope.value("type", std::string("default")));
    if (type != "default")
      raise<ConfigError>("{}: {} of type {} is not supported, wanted default", where, key, type);
    if (present(rope, "rope_theta")) read(rope.at("rope_theta"), "rope_theta", config.rope_theta);
  }
}

}  // namespace

void LlamaConfig::check() const {
  const auto positive = [](const char* key, int64_t value) {
    if (value <= 0) raise<ConfigError>("{}: wanted a positive number, got {}", key, value);
  };
  positive("hidden_size", hidden_size);
  positive("intermediate_size", intermediate_size);
  positive("num_hidden_layers", num_hidden_layers);
  positive("num_attention_heads", num_attention_heads);
  positive("num_key_value_heads", num_key_value_heads);
  positive("vocab_size", vocab_size);
  positive("max_position_embeddings", max_position_embeddings);
  if (num_attention_heads % num_key_value_heads != 0)
    raise<ConfigError>("num_key_value_heads {} does not divide num_attention_heads {}",
                       num_key_value_heads, num_attention_heads);
  if (head_dim <= 0 || head_dim % 2 != 0)
    raise<ConfigError>("head_dim: wanted a positive even number, got {}", head_dim);
  if (!(rms_norm_eps > 0)) raise<ConfigError>("rms_norm_eps: wanted above 0, got {}", rms_norm_eps);
  if (!(rope_theta > 0)) raise<ConfigError>("rope_theta: wanted above 0, got {}", rope_theta);
  if (!(initializer_range >= 0))
    raise<ConfigError>("initializer_range: wanted at least 0, got {}", initializer_range);
}

LlamaConfig parse_llama_config(const json& options) {
  if (!options.is_object())
    raise<ConfigError>("model options: wanted a table, got {}", options.dump());
  for (const auto& item : options.items()) {
    bool known = false;
    std::string all;
    LlamaConfig any;
    for_fields(any, [&](const char* key, auto&) {
      known |= item.key() == key;
      all += (all.empty() ? "" : ", ") + std::string(key);
    });
    if (!known) raise<ConfigError>("unknown model option {}; there are {}", item.key(), all);
  }
  const LlamaConfig config = read_fields(options);
  if (!options.contains("head_dim") &&
      config.hidden_size % std::max<int64_t>(config.num_attention_heads, 1) != 0)
    raise<ConfigError>("num_attention_heads {} does not divide hidden_size {}",
                       config.num_attention_heads, config.hidden_size);
  config.check();
  return config;
}

LlamaConfig parse_hugging_face_config(const std::string& text, const std::string& where) {
  const json options = json::parse(text, nullptr, false);
  if (!options.is_object()) raise<FileError>("{}: not a JSON object", where);
  if (const auto type = options.value("model_type", std::string()); type != "llama")
    raise<ConfigError>("{}: model_type: wanted llama, got {}", where, type);
  for (const char* key : {"attention_bias", "mlp_bias"})
    if (options.value(key, false)) raise<ConfigError>("{}: {} is not supported", where, key);
  if (const auto act = options.value("hidden_act", std::string("silu")); act != "silu")
    raise<ConfigError>("{}: hidden_act: wanted silu, got {}", where, act);
  LlamaConfig config = read_fields(options);
  read_rope(options, config, where);
  config.check();
  return config;
}

std::string hugging_face_config(const LlamaConfig& config) {
  json out = {{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"mlp_bias", false},
              {"torch_dtype", "float32"}};
  for_fields(config, [&](const char* key, const auto& field) { out[key] = field; });
  out["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", config.rope_theta}};
  return out.dump(2) + "\n";
}

}  // namespace dovetail::models
