// Cross-entropy of logits against target classes, summed: loss and gradient in fp32 per row, with
// no copy of the logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dovetail::ops {

struct LossSum {
  at::Tensor
      sum;  // 0-dim fp32: minus the log-probability of each target, in nats, added up in row order
  int64_t count = 0;  // targets that took part
};

template <class F>
void visit_members(LossSum& loss, F&& f) {
  f(loss.sum);
}

// What backward may do with the logits' memory.
enum class LogitsUse {
  keep,       // the gradient is a new tensor
  overwrite,  // the gradient takes the logits' place: nobody may read them any more, and backward
              // runs once
};

// logits [..., classes] (fp32 or bf16), targets [...] int64; targets equal to ignore_index take no
// part. Throws ConfigError for another target outside [0, classes). No second-order gradient:
// backward under create_graph throws StateError, as does a second backward after `overwrite`.
LossSum softmax_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                              LogitsUse use = LogitsUse::keep, int64_t ignore_index = -100);

}  // namespace dovetail::ops
