#include "dovetail/models/lm/language_model.h"

namespace dovetail::models {
namespace {

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

}  // namespace

std::vector<TensorSpec> LanguageModel::specs() const {
  const LlamaConfig& c = llama_->config();
  std::vector<TensorSpec> out;
  for (const auto& item : llama_->named_parameters()) {
    const std::string& name = item.key();
    if (c.tie_word_embeddings && name == "lm_head.weight") continue;
    TensorSpec spec{.name = name, .shape = item.value().sizes().vec()};
    spec.kind = contains(name, "embed_tokens") || contains(name, "lm_head")
                    ? ParamKind::embedding
                    : kind_of_shape(spec.shape);
    if (contains(name, "q_proj")) spec.heads = c.num_attention_heads;
    if (contains(name, "k_proj") || contains(name, "v_proj")) spec.heads = c.num_key_value_heads;
    if (contains(name, "o_proj")) spec.heads = c.num_attention_heads, spec.heads_dim = 1;
    out.push_back(std::move(spec));
  }
  return out;
}

double LanguageModel::flops_per_token(int64_t length) const {
  const LlamaConfig& c = llama_->config();
  const double attention = static_cast<double>(c.num_attention_heads * c.head_dim);
  const double kv = static_cast<double>(c.num_key_value_heads * c.head_dim);
  const double hidden = static_cast<double>(c.hidden_size);
  const double layer =
      hidden * (2 * attention + 2 * kv) + 3 * hidden * static_cast<double>(c.intermediate_size);
  const auto layers = static_cast<double>(c.num_hidden_layers);
  return 6 * (layers * layer + hidden * static_cast<double>(c.vocab_size)) +
         6 * layers * attention * static_cast<double>(length);
}

}  // namespace dovetail::models
