// A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied
// head. Parameter names and shapes are those of Hugging Face's LlamaForCausalLM. Each layer is an
// ops::Unit, so are the embedding and the head, and the whole model is meant to be used as one:
// ops::Unit<LlamaForCausalLM>.
//
// Parameters are uninitialised until reset_parameters or a load. Built on the meta device
// (options), a model has shapes only, until ops::materialize. There are no buffers: rotary tables
// are computed from the config, in fp32 whatever the dtype of the parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <memory>
#include <vector>

#include "dovetail/models/lm/config.h"
#include "dovetail/ops/cross_entropy.h"
#include "dovetail/ops/embedding.h"
#include "dovetail/ops/linear.h"
#include "dovetail/ops/norm.h"
#include "dovetail/ops/rotary.h"
#include "dovetail/ops/unit.h"

namespace dovetail::models {

using RotaryPtr = std::shared_ptr<const ops::RotaryTable>;

class Attention : public torch::nn::Module {
 public:
  Attention(const LlamaConfig& config, RotaryPtr rotary, const at::TensorOptions& options);
  // x [batch, length, hidden] -> the same shape; causal.
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<ops::Linear> q_proj, k_proj, v_proj, o_proj;

 private:
  int64_t heads_, kv_heads_, head_dim_;
  RotaryPtr rotary_;
};

class FeedForward : public torch::nn::Module {
 public:
  FeedForward(const LlamaConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<ops::Linear> gate_proj, up_proj, down_proj;
};

class DecoderLayer : public torch::nn::Module {
 public:
  DecoderLayer(const LlamaConfig& config, RotaryPtr rotary, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<Attention> self_attn;
  std::shared_ptr<FeedForward> mlp;
  std::shared_ptr<ops::RMSNorm> input_layernorm, post_attention_layernorm;
};

// Everything below the head.
class LlamaModel : public torch::nn::Module {
 public:
  LlamaModel(const LlamaConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& tokens);  // [batch, length] -> [batch, length, hidden]

  std::shared_ptr<ops::Unit<ops::Embedding>> embed_tokens;
  std::vector<std::shared_ptr<ops::Unit<DecoderLayer>>> layers;
  std::shared_ptr<ops::RMSNorm> norm;
};

// Without targets: logits. With targets: the loss, and no logits (their memory holds their
// gradient).
struct LlamaOutput {
  at::Tensor logits;  // [batch, length, vocabulary]
  ops::LossSum loss;
};

template <class F>
void visit_members(LlamaOutput& output, F&& f) {
  f(output.logits);
  f(output.loss);
}

class LlamaForCausalLM : public torch::nn::Module {
 public:
  explicit LlamaForCausalLM(const LlamaConfig& config, const at::TensorOptions& options = {});
  // tokens, targets [batch, length] int64; undefined targets ask for logits.
  LlamaOutput forward(const at::Tensor& tokens, const at::Tensor& targets = {});
  // Normal with deviation initializer_range, divided by sqrt(2 * layers) for o_proj and down_proj;
  // norms 1. From the seed alone (models/common/init.h).
  void reset_parameters(uint64_t seed);
  const LlamaConfig& config() const { return config_; }

  std::shared_ptr<LlamaModel> model;
  std::shared_ptr<ops::Unit<ops::Linear>> lm_head;  // shares embed_tokens' weight where the config ties them

 private:
  LlamaConfig config_;
};

}  // namespace dovetail::models
