#include "dovetail/models/lm/llama.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>

#include "dovetail/base/error.h"
#include "dovetail/models/common/init.h"
#include "dovetail/ops/swiglu.h"

namespace dovetail::models {
namespace {

std::shared_ptr<ops::Linear> projection(int64_t in, int64_t out, const at::TensorOptions& options) {
  return std::make_shared<ops::Linear>(in, out, /*with_bias=*/false, options);
}

// Attention multiplies in fp32 where the CPU has no bf16 products: ATen's bf16 kernels would take
// five times as long.
at::ScalarType attention_type(at::ScalarType type) {
  return type == at::kBFloat16 && ops::bf16_gemm_path() == ops::GemmPath::widen ? at::kFloat : type;
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

Attention::Attention(const LlamaConfig& c, RotaryPtr rotary, const at::TensorOptions& options)
    : heads_(c.num_attention_heads),
      kv_heads_(c.num_key_value_heads),
      head_dim_(c.head_dim),
      rotary_(std::move(rotary)) {
  q_proj = register_module("q_proj", projection(c.hidden_size, heads_ * head_dim_, options));
  k_proj = register_module("k_proj", projection(c.hidden_size, kv_heads_ * head_dim_, options));
  v_proj = register_module("v_proj", projection(c.hidden_size, kv_heads_ * head_dim_, options));
  o_proj = register_module("o_proj", projection(heads_ * head_dim_, c.hidden_size, options));
}

at::Tensor Attention::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1);
  const at::ScalarType type = attention_type(x.scalar_type());
  const at::Tensor q = ops::rotate_heads(q_proj->forward(x), rotary_, type).transpose(1, 2);
  const at::Tensor k = ops::rotate_heads(k_proj->forward(x), rotary_, type).transpose(1, 2);
  const at::Tensor v =
      v_proj->forward(x).to(type).view({batch, length, kv_heads_, head_dim_}).transpose(1, 2);
  const at::Tensor y =
      at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                       /*is_causal=*/true, /*scale=*/{},
                                       /*enable_gqa=*/heads_ != kv_heads_);
  return o_proj->forward(
      y.transpose(1, 2).to(x.scalar_type()).reshape({batch, length, heads_ * head_dim_}));
}

FeedForward::FeedForward(const LlamaConfig& c, const at::TensorOptions& options) {
  gate_proj = register_module("gate_proj", projection(c.hidden_size, c.intermediate_size, options));
  up_proj = register_module("up_proj", projection(c.hidden_size, c.intermediate_size, options));
  down_proj = register_module("down_proj", projection(c.intermediate_size, c.hidden_size, options));
}

at::Tensor FeedForward::forward(const at::Tensor& x) {
  return down_proj->forward(ops::swiglu(gate_proj->forward(x), up_proj->forward(x)));
}

DecoderLayer::DecoderLayer(const LlamaConfig& c, RotaryPtr rotary,
                           const at::TensorOptions& options) {
  self_attn =
      register_module("self_attn", std::make_shared<Attention>(c, std::move(rotary), options));
  mlp = register_module("mlp", std::make_shared<FeedForward>(c, options));
  const auto norm = [&] {
    return std::make_shared<ops::RMSNorm>(c.hidden_size, c.rms_norm_eps, options);
  };
  input_layernorm = register_module("input_layernorm", norm());
  post_attention_layernorm = register_module("post_attention_layernorm", norm());
}

at::Tensor DecoderLayer::forward(const at::Tensor& x) {
  const at::Tensor h = x + self_attn->forward(input_layernorm->forward(x));
  return h + mlp->forward(post_attention_layernorm->forward(h));
}

LlamaModel::LlamaModel(const LlamaConfig& c, const at::TensorOptions& options) {
  const auto rotary =
      std::make_shared<const ops::RotaryTable>(c.head_dim, c.max_position_embeddings, c.rope_theta);
  embed_tokens = register_module(
      "embed_tokens",
      std::make_shared<ops::Unit<ops::Embedding>>(c.vocab_size, c.hidden_size, options));
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    layers.push_back(std::make_shared<ops::Unit<DecoderLayer>>(c, rotary, options));
    list->push_back(layers.back());
  }
  register_module("layers", list);
  norm = register_module("norm",
                         std::make_shared<ops::RMSNorm>(c.hidden_size, c.rms_norm_eps, options));
}

at::Tensor LlamaModel::forward(const at::Tensor& tokens) {
  at::Tensor x = embed_tokens->forward(tokens);
  for (const auto& layer : layers) x = layer->forward(x);
  return norm->forward(x);
}

LlamaForCausalLM::LlamaForCausalLM(const LlamaConfig& config, const at::TensorOptions& options)
    : config_(config) {
  config.check();
  model = register_module("model", std::make_shared<LlamaModel>(config, options));
  using Head = ops::Unit<ops::Linear>;
  lm_head = register_module(
      "lm_head", config.tie_word_embeddings
                     ? std::make_shared<Head>(model->embed_tokens->weight)
                     : std::make_shared<Head>(config.hidden_size, config.vocab_size,
                                              /*with_bias=*/false, options));
  const auto workspace = std::make_shared<ops::Workspace>();
  apply([&](torch::nn::Module& module) {
    if (auto* linear = dynamic_cast<ops::Linear*>(&module)) linear->set_workspace(workspace);
  });
}

LlamaOutput LlamaForCausalLM::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  if (tokens.dim() != 2)
    raise<ConfigError>("tokens: wanted [batch, length], got {}", c10::str(tokens.sizes()));
  LlamaOutput output;
  at::Tensor logits = lm_head->forward(model->forward(tokens));
  if (targets.defined())
    output.loss = ops::softmax_cross_entropy(logits, targets, ops::LogitsUse::overwrite);
  else
    output.logits = std::move(logits);
  return output;
}

void LlamaForCausalLM::reset_parameters(uint64_t seed) {
  const at::NoGradGuard no_grad;
  const double deviation = config_.initializer_range;
  const double output_deviation =
      deviation / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));
  for (const auto& item : named_parameters()) {
    const std::string& name = item.key();
    const at::Tensor& parameter = item.value();
    if (parameter.is_meta())
      raise<StateError>("{} is on the meta device: materialize the model first", name);
    if (config_.tie_word_embeddings && name == "lm_head.weight") continue;
    const bool output = ends_with(name, "o_proj.weight") || ends_with(name, "down_proj.weight");
    if (parameter.dim() == 1)
      at::Tensor(parameter).fill_(1);
    else
      fill_normal(parameter, output ? output_deviation : deviation, seed, name);
  }
}

}  // namespace dovetail::models
