// The Llama behind the trainer's interface.
#pragma once

#include <memory>

#include "dovetail/models/common/model.h"
#include "dovetail/models/lm/llama.h"

namespace dovetail::models {

class LanguageModel : public Model {
 public:
  explicit LanguageModel(const LlamaConfig& config, const at::TensorOptions& options = {})
      : llama_(std::make_shared<ops::Unit<LlamaForCausalLM>>(config, options)) {}

  ops::Unit<LlamaForCausalLM>& llama() { return *llama_; }
  torch::nn::Module& module() override { return *llama_; }
  void reset_parameters(uint64_t seed) override { llama_->reset_parameters(seed); }
  ops::LossSum loss(const at::Tensor& tokens, const at::Tensor& targets) override {
    return llama_->forward(tokens, targets).loss;
  }
  at::Tensor logits(const at::Tensor& tokens) override { return llama_->forward(tokens).logits; }
  // Queries, keys and values consist of heads along dim 0, the output projection along dim 1.
  std::vector<TensorSpec> specs() const override;
  int64_t vocabulary() const override { return llama_->config().vocab_size; }
  int64_t context() const override { return llama_->config().max_position_embeddings; }
  // 6 per weight of a matrix product (2 forward, 4 backward), and 6 * length * heads * head_dim a
  // layer for the causal half of both attention products.
  double flops_per_token(int64_t length) const override;

 private:
  std::shared_ptr<ops::Unit<LlamaForCausalLM>> llama_;
};

}  // namespace dovetail::models
