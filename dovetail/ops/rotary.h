// Rotary position embedding (Su et al. 2021) in the "rotate half" convention of Hugging Face's
// Llama: of a head of d elements, element i (< d/2) is paired with i + d/2 and the pair is turned
// by position * base^(-2i/d).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace dovetail::ops {

// Cosines and sines of every angle, fp32, a pure function of its arguments: never stored, never
// cast with a model.
class RotaryTable {
 public:
  // Throws ConfigError unless head_dim is even and positive.
  RotaryTable(int64_t head_dim, int64_t positions, double base);
  int64_t positions() const { return positions_; }
  int64_t half() const { return half_; }
  const float* cosine(int64_t position) const { return cosine_.data() + position * half_; }
  const float* sine(int64_t position) const { return sine_.data() + position * half_; }

 private:
  int64_t half_, positions_;
  std::vector<float> cosine_, sine_;
};

// x [batch, length, heads * head_dim] (fp32 or bf16) -> [batch, length, heads, head_dim] in
// `out_type`, position t of each sequence turned by t. The backward pass turns back. Differentiable
// any number of times. Throws ConfigError where length exceeds the table.
at::Tensor rotate_heads(const at::Tensor& x, const std::shared_ptr<const RotaryTable>& table,
                        at::ScalarType out_type);

}  // namespace dovetail::ops
